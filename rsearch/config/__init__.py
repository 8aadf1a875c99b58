"""Configurations: load a recipe, override its fields, check them, plan its stages.

Imports `text`, `hosts` and `runtime`. Begin with `recipes.py`.
"""
