"""What a run would take: memory, FLOPs and seconds, without the machine.

Imports everything but commands. Begin with `command.py`.
"""
