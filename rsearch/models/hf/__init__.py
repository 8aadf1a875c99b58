"""Hugging Face directories: configurations, weights, and the layouts of families.

Begin with `checkpoint.py`.
"""
