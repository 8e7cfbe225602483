"""Measures the stack against its peers; see docs/performance.md once it exists."""
