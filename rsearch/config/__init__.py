"""Configurations: load a recipe, override its fields, check them, plan its stages.

Imports `text` and `runtime.console`. Begin with `recipes.py`.
"""
