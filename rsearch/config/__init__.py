"""Configurations: load a recipe, override and check its fields, and plan its stages.

Imports `text`, `hosts` and `runtime`. Begin with `recipes.py`.
"""
