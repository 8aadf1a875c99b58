"""Attention: within packed rows, after a cached past, in pages, and on TPUs.

Begin with `cached.py`, which the decoder calls.
"""
