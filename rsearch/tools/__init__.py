"""Tools: what a policy can call. A tool is (calls) -> results, batched.

Imports `text`. Begin with `search.py`; a tool takes its own file and a line of
`table.py`.
"""
