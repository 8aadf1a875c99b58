"""Benchmarks: this package beside its peers, on the same machine.

Imports `config`, `runtime`, `models`, `protocols`, `tools`, `data`, `retrieval`,
`rollout`, `rewards`, `learn`, `world`, `setup`, `stages` and `plan`. Begin with
`__main__.py`. Each benchmark (rollout, train, retrieval, step, growth) is a file with
its flags, its comparison and this package's side of it; `peers.py`, `engines.py` and
`neighbours.py` hold the other sides. A subject is a function `make...(**settings)` that
returns a function () -> dict, which does one repetition and returns its numbers.
"""
