"""Reward terms, and how they are weighted and summed to a rollout's reward.

Imports `text` and `protocols`. Begin with `group.py`, then `terms.py`.
"""
