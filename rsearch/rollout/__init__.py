"""Rollouts: the policy writes on the device, tools answer on the host.

Imports `models`, `protocols` and `hosts`. Begin with `driver.py`, then `sampler.py`.
"""
