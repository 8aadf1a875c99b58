"""A trained policy at work: it answers questions in Python and over HTTP.

Imports `hosts`, `config`, `runtime`, `protocols`, `rollout`, `setup` and
`evaluation`. Begin with `search_tool.py`.
"""
