"""Benchmarks: what Holdfast costs beside its peers and beside the machine's own limits."""
