"""What a run leans on: the workdir, checkpoints, journals, metrics, console, HTTP.

Imports `hosts` and `config`. Begin with `workdir.py`.
"""
