"""Answers to held-out questions: who gives them, how they are scored and shown.

Imports `setup` and everything below it. Begin with `evaluator.py`.
"""
