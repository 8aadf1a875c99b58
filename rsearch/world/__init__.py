"""The embedded world: made-up facts, questions about them, and small models of them.

Imports `runtime`, `models`, `protocols`, `tools`, `data`, `retrieval`, `rollout` and
`learn`. Begin with `world.py`; `pretrained.py` trains the small models.
"""
