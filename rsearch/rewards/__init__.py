"""Reward terms: what a rollout earns, and how terms are weighed and summed.

Imports `protocols` and `text`. Begin with `group.py`, then `terms.py`.
"""
