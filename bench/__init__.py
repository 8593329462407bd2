"""Benchmarks of flash_cuda beside its peers: `python -m bench.run --help`."""
