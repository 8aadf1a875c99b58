"""Data stages: the stage's model answers questions, and what is worth learning is kept.

Begin with `run.py`.
"""
