"""Make the objects of a run from its configuration, which no lower package takes.

Imports `text`, `hosts`, `config`, `runtime`, `models`, `protocols`, `tools`, `data`,
`retrieval`, `rollout`, `rewards`, `llm`, `learn`, `world` and `methods`. Commands call
`load.load_setup` and pass the objects that the modules here make from its result to the
stages and to evaluation, which import none of these modules. Begin with `context.py`,
then `load.py`.
"""
