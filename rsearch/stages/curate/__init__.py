"""Data stages: the stage's model answers questions, and what is worth learning is kept.

Start with `run.py`.
"""
