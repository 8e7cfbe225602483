"""Bringing versions from where they are published to a shard's own disk: what a pod's side-car runs."""
