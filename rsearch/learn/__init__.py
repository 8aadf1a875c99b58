"""From rollouts to gradients: batches, advantages, losses, packing, updates.

Imports `models`. Pure functions of arrays. Begin with `losses.py`, then `update.py`.
"""
