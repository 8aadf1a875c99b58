"""Benchmarks that compare this package with its peers on the same machine.

Imports `config`, `runtime`, `models`, `protocols`, `tools`, `data`, `retrieval`,
`rollout`, `rewards`, `learn`, `world`, `setup`, `stages` and `plan`. Begin with
`__main__.py`. Each benchmark (rollout, train, retrieval, step, growth) is a file with
its flags, the comparison, and the code that measures this package; `peers.py`,
`engines.py` and `neighbours.py` measure the peers. A subject is a function
`make...(**settings)` that returns a function () -> dict, which runs one repetition and
returns its numbers.
"""
