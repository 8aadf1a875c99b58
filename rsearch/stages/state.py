"""Where a stage stands: its newest checkpoint, or its beginning."""

import math

from rsearch import build, checkpoint, console
from rsearch.evaluate import CHECKPOINTS


def open_state(setup: build.Setup, kind: str, params, folder):
    """What a stage goes on with.

    Args:
        setup: of the stage.
        kind: "sft" or "rl".
        params: of the policy before the stage; a fresh state copies them.
        folder: of the stage.

    Returns:
        The Learner, the first step that is still to be done, and the TrainState.
    """
    learner, _ = build.make_learner(setup, kind)
    like = build.state_shapes(setup, kind)
    found = checkpoint.newest_good(folder / CHECKPOINTS, like)
    if found is None:
        return learner, 0, build.fresh_state(setup, kind, params)
    first, state, _ = found
    return learner, first, state


def save_state(setup: build.Setup, kind: str, done: int, state, folder) -> None:
    """Saves after `done` steps where the configuration says so, and at the end."""
    c = setup.config
    if done % c.checkpoint[f"{kind}_steps"] == 0 or done == c[kind].steps:
        checkpoint.save(folder / CHECKPOINTS, done, state, {}, keep=c.checkpoint.keep)


def tell_if_skipped(stage: str, step: int, measured) -> None:
    """Tells people of an update that was left out: its gradient was not finite."""
    for name in ("grad_norm", "critic_grad_norm"):
        if not math.isfinite(measured.get(name, 0.0)):
            told = f"{name} = {float(measured[name])}; this update is left out"
            console.note(f"{stage}: step {step + 1}: {told}")
