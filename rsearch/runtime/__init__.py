"""The workdir, checkpoints, journals, metrics, console and HTTP of a run.

Imports `hosts` and `config`. Start reading at `workdir.py`.
"""
