"""The methods that trained policies are compared with: one program each.

Imports `text`, `hosts`, `protocols`, `tools`, `data`, `rollout` and `llm`. Begin with
`reading.py`.
"""
