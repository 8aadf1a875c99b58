"""What a run would take: memory, FLOPs and seconds, without the machine.

Imports `hosts`, `config`, `runtime`, `models`, `protocols`, `rollout`, `learn` and
`setup`. Begin with `command.py`.
"""
