"""The stages of a run: curate, SFT and RL, each a loop that reads top to bottom.

Imports `text`, `hosts`, `config`, `runtime`, `models`, `protocols`, `data`,
`retrieval`, `rollout`, `rewards`, `learn` and `world`. Start with `rl.py`.
"""
