"""Every stage of every recipe has the same metrics on any devices and hosts."""

import dataclasses
import functools
import pathlib
import sys
import tempfile

import jax
import numpy as np
import pytest

from rsearch.config import recipes as configuration
from rsearch.config.stage_plan import kind_of, stage_config
from rsearch.models.sharding import make_mesh
from rsearch.rollout.records import Rewarded
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.load import load_setup
from rsearch.setup.weights import initial_params
from rsearch.stages import rl
from rsearch.types import Group, Outcome, Rollout, Segment, Source
from rsearch.world import pretrained
from rsearch.world.world import make_world
from tests import small_world
from tests.hosts.test_processes import run_hosts
from tests.small_run import quick_compilation, run_python, without_times
from tests.small_world import FROM_SCRATCH, MODEL, WORLD
from tests.stages.running import run_rl, run_sft

__all__ = ["quick_compilation"]
_folder = tempfile.TemporaryDirectory(prefix="rsearch-devices-")

# Makes AdamW's steps as smooth as the gradients. With the usual 1e-8 they are about
# the gradients' signs, which rounding decides for a gradient close to 0.
SMOOTH = {
    "optim.eps": 1.0,
    "optim.weight_decay": 0.0,
    "sft.lr": 0.3,
    "sft.warmup_steps": 0,
    "rl.lr": 0.3,
    "critic.lr": 0.3,
}
SIZES = small_world.SIZES | SMOOTH

FORM = {"answer_em": {}, "format_ok": {"good": 0.1, "bad": 0.0}}
KL = {"rl.kl_coef": 0.1}  # large enough to be seen
RECIPES = {
    "quickstart": {
        **FROM_SCRATCH,
        "tokenizer.source": "",
        "model.source": "world:base",
    },
    "search_r1:tiny": {**KL, "reward": FORM},
    "search_r1:tiny,grpo,parity": KL,
    # At first only its value model learns; the policy does in the third step.
    "rag_r1:tiny": {**KL, "reward": FORM, "rl.steps": 3},
    "r1_searcher:tiny,select": {**KL, "overrides.rl_retrieve.rl.steps": 2},
    "r1_searcher_pp:tiny": {
        **KL,
        "rl.steps": 3,  # in the first its rewriter may have nothing to do
        "rl.memorise_coef": 0.1,
        "rl.memorise_rows": 8,
        # Such a small model is rarely right.
        "overrides.curate_sft.curate.measure": "f1",
        "overrides.curate_sft.curate.rollouts": 16,
        "overrides.curate_rewriter.curate.measure": "f1",
        "overrides.curate_rewriter.curate.rollouts": 16,
        "overrides.sft_rewriter.sft.steps": 2,
        "overrides.sft_rewriter.sft.lr": 0.3,
        # Batches of one size, whose programs are compiled once.
        "models.rewriter.max_concurrent": 1,
    },
    "r_search:tiny": {**KL, "models.judge.max_concurrent": 16},
    "rearag:tiny": {
        "models.writer.max_concurrent": 16,
        "models.answerer.max_concurrent": 16,
    },
}
PLACES = {  # devices per host, (data, fsdp, tensor), hosts
    "one device": (1, (1, 1, 1), 1),
    "two devices": (2, (1, 2, 1), 1),
    "four devices": (4, (1, 2, 2), 1),
    "eight devices": (8, (2, 2, 2), 1),
    "two hosts": (2, (1, 2, 2), 2),
}
EVERYWHERE = [place for place in PLACES if place != "one device"]


def spec_of(recipe):
    """Return the value of --config for a recipe."""
    name, colon, variant = recipe.partition(":")
    return f"configs/{name}.py{colon}{variant}"


def close(ours, theirs):
    """Return whether two dicts of numbers are equal up to rounding."""
    assert ours.keys() == theirs.keys()
    return ours == pytest.approx(theirs, rel=1e-4, abs=2e-6)


# Metrics of the learning stages, on made-up rollouts.

LITTLE = {
    **SIZES,
    "model.source": "",
    "tokenizer.source": "world",
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.mlp_width": 16,
    "rollout.max_searches": 1,
    "rollout.max_prompt_tokens": 40,
    "rollout.max_turn_tokens": 6,
    "rollout.max_observation_tokens": 8,
    "sft.sequence_tokens": 96,
    "rl.updates_per_step": 1,
    "rl.memorise_rows": 8,
    **dict.fromkeys(("models.writer.source", "models.answerer.source"), ""),
}
LEARNING = [
    ("rearag:tiny", "sft"),
    ("search_r1:tiny,grpo,parity", "rl"),
    # Slow together. The two above cover each kind of update, and
    # tests/learn/test_critic.py covers that of a value model.
    pytest.param("rag_r1:tiny", "rl", marks=pytest.mark.slow),
    pytest.param("r1_searcher:tiny,select", "rl_answer", marks=pytest.mark.slow),
    pytest.param("r1_searcher_pp:tiny", "rl", marks=pytest.mark.slow),
    pytest.param("r_search:tiny", "rl", marks=pytest.mark.slow),
]


@functools.cache
def world():
    return make_world(seed=0, **WORLD)


def made_up(rng, lengths):
    """Return a rollout of random ids: prompt, turn, passage, turn."""
    sources = (Source.PROMPT, Source.POLICY, Source.SEARCH, Source.POLICY)
    segments = tuple(
        Segment(
            source,
            rng.integers(1, 300, size, np.int32),
            -rng.random(size, np.float32) * 3 * (source == Source.POLICY),
            "",
        )
        for source, size in zip(sources, lengths, strict=True)
    )
    return Rollout(segments, "x", (), Outcome.ANSWERED)


def made_up_step(c, step):
    """Return groups of such rollouts with their rewards, and their metrics."""
    rng = np.random.default_rng(step)
    size = c.rl.questions_per_step, c.rollout.group_size
    told = dict.fromkeys(("reward", "searches", "policy_tokens"), 0.0)
    groups = [
        Group(
            world().train[i],
            tuple(
                made_up(rng, (9, rng.integers(1, 7), 5, rng.integers(1, 7)))
                for _ in range(size[1])
            ),
        )
        for i in range(size[0])
    ]
    rewards = rng.choice(np.float32([0, 0.5, 1]), size)
    return [Rewarded(g, r, {}) for g, r in zip(groups, rewards, strict=True)], told


class MadeUpMemory:
    """Made-up rows to memorise, in place of a Memory."""

    def collect(self, step, groups):
        return {}

    def rows(self, step):
        rng = np.random.default_rng(100 + step)
        return [made_up(rng, (7, 4, 0, 0)).segments for _ in range(3)]


def measured(recipe, stage, mesh, folder):
    """Run a stage on a mesh of the first devices here; return its metrics."""
    whole = configuration.load(spec_of(recipe))
    own = {n: v for n, v in RECIPES[recipe].items() if n.startswith(("rl.", "reward"))}
    whole = configuration.apply_overrides(whole, LITTLE | own)
    c = stage_config(whole, stage)
    setup = load_setup(c, only_dev=True, only_policy=True)
    devices = jax.devices()[: int(np.prod(mesh))]
    data, fsdp, tensor = mesh
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
    setup = dataclasses.replace(setup, mesh=mesh)
    params = initial_params(setup)
    if kind_of(stage) == "sft":
        rng = np.random.default_rng(0)
        rollouts = [made_up(rng, (9, 6, 5, 1 + i % 6)) for i in range(20)]
        run_sft(setup, rollouts, params, folder)
    else:
        memory = MadeUpMemory() if c.rl.memorise_coef else None
        run_rl(setup, None, params, folder, stage=stage, memory=memory)
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(("recipe", "stage"), LEARNING)
def test_a_stage_learns_the_same_on_eight_devices_as_on_one(
    recipe, stage, tmp_path, monkeypatch
):
    def sample_groups(play, questions, *, step, **settings):
        (stage,) = [arg for arg in play.args if isinstance(arg, rl.RLStage)]
        return made_up_step(stage.config, step)

    monkeypatch.setattr(rl, "sample_groups", sample_groups)
    one = measured(recipe, stage, (1, 1, 1), tmp_path / "one")
    eight = measured(recipe, stage, (2, 2, 2), tmp_path / "eight")
    assert len(one) >= 2
    names = {"sft": "loss", "rl": "sampler_gap"}
    assert all(row[names[kind_of(stage)]] > 0.01 for row in one)
    assert all(row["grad_norm"] > 1e-3 for row in one[-2:] if "grad_norm" in row)
    for ours, theirs in zip(without_times(eight), without_times(one), strict=True):
        assert close(ours, theirs)
    for rows in (one, eight):
        check_compiled_once(rows)


def check_compiled_once(rows):
    """Check that a stage compiles only in its first step, or when a part first runs."""
    waits = int("critic_loss" in rows[0] and "loss" not in rows[0])  # for the policy
    asked = [row.get("memory_asked", 0) > 0 for row in rows]  # the rewriter
    waits = max(waits, asked.index(True) if any(asked) else 0)
    counts = [row["compiles"] for row in rows[waits:]]
    assert len(counts) >= 2 and len(set(counts)) == 1


# Whole runs: every stage and its data, in processes of their own.


def make_model(cache):
    """Train a small model in place of all that recipes name; return its directory."""
    return pretrained.find_world_model(
        "base",
        world_settings=dict(configuration.load(spec_of("quickstart")).world) | WORLD,
        seed=0,
        cache=cache,
        pretraining=MODEL,
    )


@functools.cache
def model():
    """Return its directory. It is trained on one device: eight simulated are slow."""
    cache = pathlib.Path(_folder.name) / "models"
    done = run_python("-m", "tests.test_devices", cache)
    assert done.returncode == 0, done.stderr
    (actual,) = cache.iterdir()
    return actual


def arguments(recipe, workdir, mesh):
    """Return the arguments of a recipe at these sizes, with `model()` as all models."""
    whole = configuration.load(spec_of(recipe))
    changes = {**SIZES, **RECIPES[recipe]}
    for field, value in (configuration.fields(whole) | changes).items():
        if field.endswith(".source") and str(value).startswith("world:"):
            changes[field] = str(model())
    changes |= dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
    return [
        f"--config={spec_of(recipe)}",
        f"--workdir={workdir}",
        *(f"--config.{field}={value}" for field, value in changes.items()),
    ]


@functools.cache
def run_at(recipe, place):
    """Run a whole recipe; return its workdir."""
    devices, mesh, num_hosts = PLACES[place]
    workdir = pathlib.Path(_folder.name) / f"{recipe} on {place}".replace(":", "_")
    command = ("-m", "rsearch.train", *arguments(recipe, workdir, mesh))
    if num_hosts == 1:
        done = run_python(*command, devices=devices)
        assert done.returncode == 0, done.stderr
    else:
        for code, _, error in run_hosts(*command, devices=devices, count=num_hosts):
            assert code == 0, error
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_same_results_on_any_devices_and_hosts(recipe, place):
    """Its data and answers are identical, and its metrics equal up to rounding."""
    one, there = run_at(recipe, "one device"), run_at(recipe, place)
    texts = [file.relative_to(one) for file in sorted(one.rglob("*.jsonl"))]
    trained = [file for file in texts if file.name == "metrics.jsonl"]
    stages = configuration.load(spec_of(recipe)).stages
    assert len(trained) == sum(kind_of(stage) != "curate" for stage in stages)
    for file in texts:
        if file not in trained:
            assert (there / file).read_bytes() == (one / file).read_bytes(), file
            continue
        rows = [read_metrics(run / file) for run in (there, one)]
        for ours, theirs in zip(*map(without_times, rows), strict=True):
            assert close(ours, theirs), file
        check_compiled_once(rows[0])
        if file.parent.name.startswith("rl"):
            nucleus = configuration.load(spec_of(recipe)).rollout.top_p < 1
            assert all(nucleus or row["sampler_gap"] < 1e-5 for row in rows[0])


if __name__ == "__main__":
    make_model(sys.argv[1])
