"""Protocols between policy and tools, and the prompts of all other models.

Imports `text` and `tools`. Begin with `base.py`, then `tagged.py`.
"""
