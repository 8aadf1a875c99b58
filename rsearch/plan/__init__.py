"""Estimate what a run would take in memory, FLOPs and seconds, without the machine.

Imports `hosts`, `config`, `runtime`, `models`, `protocols`, `retrieval`, `data`,
`rollout`, `learn`, `methods`, `setup` and `evaluation`. Begin with `command.py`.
"""
