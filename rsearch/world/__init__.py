"""The embedded world: made-up facts, questions about them, and small models of them.

Imports `data`. Begin with `world.py`; `pretrained.py` trains the small models.
"""
