"""Tools that a policy can call. A tool is a batched function (calls) -> results.

Imports `text`. Begin with `search.py`. A new tool is a file of its own and a line
in `table.py`.
"""
