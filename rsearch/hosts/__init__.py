"""The processes of one run: collectives, preemption, heartbeats, host memory.

Imports nothing else of the package. Begin with `processes.py`.
"""
