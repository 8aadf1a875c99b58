"""Answer questions with a trained policy, from Python and over HTTP.

Imports `hosts`, `config`, `runtime`, `protocols`, `rollout`, `setup` and
`evaluation`. Begin with `search_tool.py`.
"""
