"""What a run leans on: files, the workdir, checkpoints, journals, metrics, the console.

Imports `config` and `hosts`. Begin with `workdir.py`.
"""
