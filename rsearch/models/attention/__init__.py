"""Attention: within packed rows, to a KV cache, to a paged cache; GPU and TPU kernels.

Start with `cached.py`, which the decoder calls.
"""
