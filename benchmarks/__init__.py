"""Benchmarks: ``python -m benchmarks`` (as root, with an engine)."""
