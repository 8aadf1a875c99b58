"""Rollouts: the policy writes on the device, tools answer on the host.

Imports `models`, `protocols` and `hosts`. Begin with `scheduler.py`, then `decode.py`.
"""
