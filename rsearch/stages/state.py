"""Where a stage stands: its newest checkpoint, or its beginning."""

from rsearch import build, checkpoint
from rsearch.evaluate import CHECKPOINTS
from rsearch.learn.update import create_state, state_like
from rsearch.models.weights import param_shapes


def open_state(setup: build.Setup, stage: str, params, folder):
    """What a stage goes on with.

    Args:
        setup: of the run.
        stage: "sft" or "rl".
        params: of the policy before the stage; a fresh state copies them.
        folder: of the stage.

    Returns:
        The Learner, the first step that is still to be done, and the TrainState.
    """
    learner, optimizer = build.make_learner(setup, stage)
    like = state_like(param_shapes(setup.model.spec), optimizer, setup.mesh)
    found = checkpoint.newest_good(folder / CHECKPOINTS, like)
    if found is None:
        return learner, 0, create_state(params, optimizer, setup.mesh)
    first, state, _ = found
    return learner, first, state


def save_state(setup: build.Setup, stage: str, done: int, state, folder) -> None:
    """Saves after `done` steps where the configuration says so, and at the end."""
    c = setup.config
    if done % c.checkpoint[f"{stage}_steps"] == 0 or done == c[stage].steps:
        checkpoint.save(folder / CHECKPOINTS, done, state, {}, keep=c.checkpoint.keep)
