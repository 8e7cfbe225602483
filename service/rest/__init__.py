"""The HTTP edge: KServe v2 with its binary tensor extension, and JSON for people. Knows nothing of gRPC."""
