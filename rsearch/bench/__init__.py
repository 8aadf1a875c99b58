"""Benchmarks: this package beside its peers, on the same machine.

Imports everything but commands. Begin with `__main__.py`.
"""
