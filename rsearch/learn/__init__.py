"""From rollouts to gradients: batches, advantages, losses, packing, updates.

Imports `hosts` and `models`. Start with `losses.py`, then `update.py`.
"""
