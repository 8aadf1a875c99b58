"""Load, check, select and order questions, corpora and demonstrations.

Imports `text`, `runtime`, `protocols` and `tools`. Begin with `questions.py`.
"""
