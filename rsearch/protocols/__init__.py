"""Protocols: how policy and tools talk, and the prompts of all models that are asked.

Imports `text` and `tools`. Begin with `base.py`, then `tagged.py`.
"""
