"""Attention: within packed rows, to a cache, to a cache in pages, and on TPUs.

Begin with `cached.py`, which the decoder calls.
"""
