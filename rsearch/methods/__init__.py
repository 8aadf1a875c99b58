"""The methods that trained policies are compared with, each written as a program.

Imports `text`, `hosts`, `protocols`, `tools`, `data`, `rollout` and `llm`. Begin with
`reading.py`.
"""
