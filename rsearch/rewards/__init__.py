"""Reward terms: what a rollout earns, and how terms are weighed and summed.

Imports `text` and `protocols`. Begin with `group.py`, then `terms.py`.
"""
