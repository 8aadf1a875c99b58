"""Compare what a step has stored with recomputed values, number by number."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

LOG_PROBS, BY_SAMPLER = "log_probs", "sampler_log_probs"
BY_TOKEN = (LOG_PROBS, "advantage")  # quantities that a tolerance applies to
JUDGE_ERROR = "judge_error"
METRIC = "metrics."  # prefix of a metric's name


class Comparison(NamedTuple):
    """A quantity, and how its values differ.

    Attributes:
        name: name of the quantity.
        count: number of values compared.
        num_different: number of values that differ.
        largest: largest difference between two numbers; None if no two numbers differ.
        first: (group, rollout) of the first value that differs; None if none does, or
            if it belongs to no rollout.
    """

    name: str
    count: int = 0
    num_different: int = 0
    largest: float | None = None
    first: tuple[int, int] | None = None

    @property
    def unit(self) -> str:
        """Return the unit of `count`: "tokens" or "rollouts"; "" for metrics."""
        if self.name.startswith(METRIC):
            return ""
        return "tokens" if self.name in (*BY_TOKEN, BY_SAMPLER) else "rollouts"


def compare_rollouts(
    stored: Sequence[Mapping],
    recomputed: Sequence[Mapping],
    *,
    num_exact: int | None = None,
    tolerance: float = 0.0,
    excluded: Iterable[str] = (),
) -> list[Comparison]:
    """Compare lines of a step's file, see `rollout_log.rollout_rows`.

    If the trainer's log-probabilities are not stored, the sampler's are compared
    instead. A different program computed these, so they may always differ by
    `tolerance`.

    Args:
        stored: lines of the file.
        recomputed: recomputed lines of the same rollouts.
        num_exact: number of first rollouts in which everything must be equal bit for
            bit; in the others log-probabilities and advantages may differ by
            `tolerance`. None means all.
        tolerance: see `num_exact`.
        excluded: quantities that are not compared.
    """
    comparisons: dict[str, Comparison] = {}
    for number, (old_row, new_row) in enumerate(zip(stored, recomputed, strict=True)):
        is_exact = num_exact is None or number < num_exact
        old_values, new_values = _values(old_row), _values(new_row)
        if new_values[LOG_PROBS] and not old_values[LOG_PROBS]:
            new_values[BY_SAMPLER] = new_values.pop(LOG_PROBS)
            old_values[BY_SAMPLER] = _by_token(old_row, BY_SAMPLER)
        for name in dict.fromkeys([*old_values, *new_values]):
            # If the judge failed on a rollout, there is no verdict to compare with.
            is_term = name.startswith("reward_")
            if name in excluded or (is_term and old_row["outcome"] == JUDGE_ERROR):
                continue
            is_rounded = name == BY_SAMPLER or (name in BY_TOKEN and not is_exact)
            max_distance = tolerance if is_rounded else 0.0
            comparisons[name] = _add_values(
                comparisons.get(name, Comparison(name)),
                old_values.get(name, ()),
                new_values.get(name, ()),
                max_distance,
                (old_row["group"], old_row["rollout"]),
            )
    return list(comparisons.values())


def compare_metrics(
    stored: Mapping[str, Any], recomputed: Mapping[str, Any]
) -> list[Comparison]:
    """Compare the metrics of a repeated update with the step's row of metrics.jsonl."""
    return [
        _add_values(
            Comparison(f"{METRIC}{name}"), [stored.get(name)], [value], 0.0, None
        )
        for name, value in recomputed.items()
    ]


def _values(row) -> dict[str, list]:
    """Return {name: values} of the quantities that are compared for a rollout."""
    advantage = row["advantage"]
    if not isinstance(advantage, list):  # one number for all tokens of the policy
        advantage = [advantage] * len(_by_token(row, "ids"))
    return {
        "params": [row["params"]],
        "reward": [row["reward"]],
        **{f"reward_{name}": [x] for name, x in row["reward_parts"].items()},
        "in_loss": [row["in_loss"]],
        LOG_PROBS: _by_token(row, LOG_PROBS),
        "advantage": advantage,
    }


def _by_token(row, name) -> list:
    """Return a per-token field of the policy's turns, concatenated."""
    turns = [s for s in row["segments"] if s["source"] == "policy"]
    return [value for turn in turns for value in turn.get(name, ())]


def _add_values(comparison, old_values, new_values, tolerance, member) -> Comparison:
    """Return a comparison with more values added to it."""
    name, count, num_different, largest, first = comparison
    for a, b in itertools.zip_longest(old_values, new_values):
        count += 1
        distance = _distance(a, b)
        if distance is not None and distance <= tolerance:
            continue
        num_different += 1
        first = member if first is None else first
        if distance is not None:
            largest = distance if largest is None else max(largest, distance)
    return Comparison(name, count, num_different, largest, first)


def _distance(a, b) -> float | None:
    """Return the distance between two values; None for unequal non-numbers."""
    if a == b or (a != a and b != b):
        return 0.0
    is_pair = all(isinstance(x, int | float) and math.isfinite(x) for x in (a, b))
    return abs(a - b) if is_pair else None
