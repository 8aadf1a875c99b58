"""Answers to held-out questions: who gives them, how they are scored and shown.

Imports `text`, `hosts`, `config`, `runtime`, `protocols`, `tools`, `data`, `rollout`,
`llm` and `methods`. Begin with `evaluator.py`.
"""
