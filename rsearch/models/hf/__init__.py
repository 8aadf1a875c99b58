"""Hugging Face directories: their configurations and weights, one file a model family.

`families.py` holds the table of families; a family's own file says how its config.json
is read and written and what its tensors are called. `checkpoint.py` loads and exports.
"""
