"""Rollouts: the policy decodes on the device, tools answer on the host.

Imports `text`, `hosts`, `runtime`, `models`, `protocols`, `tools` and `data`. Begin
with `scheduler.py`, the loop from questions to groups; `interface.py` says what it asks
of the device and `decode.py` is what runs there.
"""
