"""Make the objects of a run from its configuration, which nothing below takes.

Imports `text`, `hosts`, `config`, `runtime`, `models`, `protocols`, `tools`, `data`,
`retrieval`, `rollout`, `rewards`, `llm`, `learn`, `world` and `methods`. Commands call
`load.load_setup`, and hand what the modules here make from it to the stages and to
evaluation, which import none of them. Begin with `context.py`, then `load.py`.
"""
