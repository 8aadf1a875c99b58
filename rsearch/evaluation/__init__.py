"""Answers to held-out questions: who gives them, how they are scored and shown.

Imports `text`, `hosts`, `runtime`, `protocols`, `data` and `rollout`. Begin with
`evaluator.py`.
"""
