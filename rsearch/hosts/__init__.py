"""The processes of one run: collectives, preemption, heartbeats, host memory.

Imports `runtime` (files and console). Begin with `processes.py`.
"""
