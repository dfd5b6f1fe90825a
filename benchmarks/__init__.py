"""Measurements of flash_attn and its peers; from the root: ``python -m benchmarks.race``."""
