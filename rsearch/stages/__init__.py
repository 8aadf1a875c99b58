"""The stages of a run: curate, SFT and RL, each a loop that reads top to bottom.

Imports `evaluation` and everything below it. Begin with `rl.py`.
"""
