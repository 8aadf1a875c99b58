"""The processes of one run: collectives, preemption, heartbeats, host memory.

Imports no other room. Begin with `processes.py`.
"""
