"""From rollouts to gradients: batches, advantages, losses, packing, updates.

Imports `hosts` and `models`. Begin with `losses.py`, then `update.py`.
"""
