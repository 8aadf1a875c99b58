"""Rollouts: the policy decodes on the device, tools answer on the host.

Imports `text`, `hosts`, `runtime`, `models`, `protocols`, `tools` and `data`. Start
with `scheduler.py`, the loop from questions to groups; `interface.py` defines the calls
that it makes to the device, and `decode.py` is what runs there.
"""
