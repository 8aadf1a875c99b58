"""Answers to held-out questions: who gives them, how they are scored and shown.

Imports `text`, `hosts`, `runtime`, `protocols`, `data`, `rollout` and `llm`. Begin with
`evaluator.py`.
"""
