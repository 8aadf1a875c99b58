"""Questions, corpora and demonstrations: read from files, checked, selected, ordered.

Imports `models` and `protocols`. Begin with `questions.py`.
"""
