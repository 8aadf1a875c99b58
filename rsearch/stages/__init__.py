"""The stages of a run: curate, SFT and RL, each a loop that reads top to bottom.

Imports `text`, `hosts`, `config`, `runtime`, `models`, `protocols`, `data`,
`retrieval`, `rollout`, `rewards`, `learn`, `world` and `methods`. Start with `rl.py`.
"""
