"""Evaluation on held-out questions: get answers, score them and show the results.

Imports `text`, `hosts`, `config`, `runtime`, `protocols`, `data`, `rollout`, `llm` and
`methods`. Begin with `evaluator.py`.
"""
