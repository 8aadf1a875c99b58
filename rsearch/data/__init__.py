"""Questions, corpora and demonstrations: read from files, checked, selected, ordered.

Imports `text`, `runtime`, `protocols` and `tools`. Begin with `questions.py`.
"""
