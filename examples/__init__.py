"""A sample collection: a real event log, and a trainer that turns it into TorchRec modules to serve."""
