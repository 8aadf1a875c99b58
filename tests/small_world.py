"""Recipes of the embedded world at small sizes, and a checkout that has only these."""

import functools
import pathlib
import re
import shutil

from rsearch.config.recipes import apply_overrides, fields
from rsearch.world import pretrained, reading

ROOT = pathlib.Path(__file__).resolve().parent.parent

WORLD = dict(
    people=30,
    films=20,
    companies=8,
    cities=8,
    train_questions=48,
    dev_questions=6,
    kinds=("single", "bridge", "comparison"),
    known_share=0.3,
    missing_share=0.0,
    distractors=0,
)
MODEL = pretrained.Pretraining(
    reading.Shares(
        facts=10, direct=1, chats=1, comparisons=50, recalled=0.4, recalling=3
    ),
    width=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=128,
    steps=600,
    lr=3e-3,
)
"""Enough to answer some questions about such a small world, in every protocol."""

SIZES = {
    **{f"world.{name}": value for name, value in WORLD.items()},
    "rollout.max_concurrent": 16,
    "rollout.group_size": 4,
    "rollout.max_searches": 2,
    "curate.retry_searches": 2,
    "rl.steps": 2,
    "rl.questions_per_step": 4,
    "rl.micro_batch": 8,
    "sft.steps": 2,
    "sft.batch_size": 16,
    "sft.micro_batch": 8,
    "eval.at_start": False,
    "eval.methods": "('protocol',)",
    "checkpoint.rl_steps": 1000,
    "checkpoint.sft_steps": 1000,
}
FROM_SCRATCH = {  # the quickstart
    "rl.dynamic_sampling_rounds": 1,
    "rollout.max_prompt_tokens": 24,
    "rollout.max_turn_tokens": 32,
    "rollout.max_observation_tokens": 24,
    "sft.sequence_tokens": 160,
}

# Appended to files of the copy that `make_checkout` makes.
SMALLER = """
from tests.small_world import smaller

get_config = smaller(get_config)
"""
SMALL_MODELS = f"""
Shares = reading.Shares
MODELS = dict.fromkeys(MODELS, {MODEL})
"""


def smaller(get_config):
    """Return a recipe's function that makes those of the embedded world small."""

    @functools.wraps(get_config)
    def get_smaller(*variant):
        config = get_config(*variant)
        if config.retrieval.corpus != "world":
            return config
        changes = dict(SIZES)
        for name in fields(config.to_dict()):
            if re.fullmatch(r"overrides\..*\.steps", name):
                changes[name] = 2
            if re.fullmatch(r"overrides\..*\.curate\.measure", name):
                changes[name] = "f1"  # such a small model is rarely right
        if config.model.source != "world:base":
            changes |= FROM_SCRATCH
        return apply_overrides(config, changes).unlock()

    return get_smaller


def make_checkout(folder: pathlib.Path):
    """Copy the checkout; its world's recipes and pretrained models are small."""
    for name in ("rsearch", "configs", "launch"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("docs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for path in (folder / "configs").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.stem != "base" and "def get_config(" in text:
            path.write_text(text + SMALLER)
    path = folder / "rsearch" / "world" / "pretrained.py"
    path.write_text(path.read_text(encoding="utf-8") + SMALL_MODELS)
