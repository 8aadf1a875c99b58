"""The processes of one run: collectives, preemption, heartbeats, host memory.

Imports no other room. Start reading at `processes.py`.
"""
