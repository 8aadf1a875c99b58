"""Hugging Face directories: configurations and weights, with one file per model family.

`families.py` holds the table of families; each family's file defines how its
config.json is read and written and what its tensors are called. `checkpoint.py` loads
and exports.
"""
