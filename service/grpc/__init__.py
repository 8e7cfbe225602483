"""The gRPC edge: KServe v2, health and reflection. Knows nothing of HTTP."""
