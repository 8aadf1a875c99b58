"""The workdir, checkpoints, journals, metrics, console and HTTP of a run.

Imports `hosts` and `config`. Begin with `workdir.py`.
"""
