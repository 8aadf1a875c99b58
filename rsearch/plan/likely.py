"""Estimate a likely step, in which rollouts are as long as those of a run.

A plan assumes that every rollout has its greatest length, which memory must allow for,
and that devices reach their peak. Shorter rollouts shorten the loops of a step and
leave pieces of its packed rows empty, but change no shape. So the lengths give each
program's share of its longest time, and nothing is compiled again.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from rsearch.learn.packing import piece_rows
from rsearch.plan.costs import most_written_and_read, read_tokens
from rsearch.rollout.decode import even_chunk
from rsearch.runtime.metrics import read_metrics
from rsearch.setup.context import ModelContext

LEARNING = ("score", "value score", "update", "value update")
LEARNING += tuple(f"{name}'s gradient" for name in LEARNING[2:])


class Lengths(NamedTuple):
    """Means of a run's rollouts, named as in its metrics.jsonl.

    Attributes:
        searches: turns that search.
        policy_tokens: tokens that the policy writes.
        tokens: tokens of the whole conversation, including the prompt and observations.
    """

    searches: float
    policy_tokens: float
    tokens: float


def read_lengths(text: str) -> Lengths:
    """Return the lengths in a text, or the means of a stage's metrics.jsonl.

    Args:
        text: "searches=2,policy_tokens=300,tokens=1700" in any order, or the file.

    Raises:
        ValueError: a length is missing, or is not a number of 0 or more.
        OSError: there is no such file.
    """
    if re.match(r"\w+=", text):
        pairs = [pair.partition("=") for pair in text.split(",")]
        values = {name.strip(): value for name, _, value in pairs}
        if sorted(values) != sorted(Lengths._fields) or len(pairs) > len(values):
            expected = ", ".join(f"{name}=NUMBER" for name in Lengths._fields)
            raise ValueError(
                f"--lengths={text}: expected all of {expected}, each once, or a file"
            )
        lengths = Lengths(*(_number(text, n, values[n]) for n in Lengths._fields))
    else:
        rows = [[row.get(n) for n in Lengths._fields] for row in read_metrics(text)]
        rows = [row for row in rows if all(map(_is_finite, row))]
        if not rows:
            raise ValueError(
                f"--lengths={text}: no row has {', '.join(Lengths._fields)}; expected "
                "the metrics.jsonl of an RL stage"
            )
        lengths = Lengths(*(float(np.mean(values)) for values in zip(*rows)))
    if lengths.searches < 0:
        raise ValueError(
            f"--lengths={text}: searches = {lengths.searches:g} must be 0 or more"
        )
    if not 0 < lengths.policy_tokens < lengths.tokens:
        raise ValueError(
            f"--lengths={text}: policy_tokens = {lengths.policy_tokens:g} must be "
            f"above 0 and below tokens = {lengths.tokens:g}"
        )
    return lengths


def _number(text, name, value):
    """Return a number of 0 or more."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"--lengths={text}: {name} must be a number of 0 or more")
    return number


def _is_finite(value):
    """Return whether a metric is a number; a step without valid rollouts has none."""
    return isinstance(value, int | float) and math.isfinite(value)


def _rows_decoding(c, rollouts, num_tokens):
    """Return how many of a host's rollouts of this length decode together."""
    rows = min(c.rollout.max_concurrent, rollouts)
    if not c.rollout.cache_tokens:
        return rows  # each has room for the longest
    return min(rows, max(1, c.rollout.cache_tokens // num_tokens))


def likely_shares(
    frame: ModelContext, lengths: Lengths, *, rollouts: int
) -> dict[str, float]:
    """Return {program: share of its longest time in a step}; 1 for those not named.

    Tokens that the policy does not write count as observations and, up to the prompt's
    budget, also as a prompt, since metrics do not say which they are.

    Args:
        rollouts: rollouts of each host in a step.

    Raises:
        ValueError: the lengths exceed the stage's budgets.
    """
    c, limits = frame.config, frame.limits
    longest_read, longest_prompt = read_tokens(c), limits.max_prompt_tokens
    most_written, most_read = most_written_and_read(
        limits, frame.num_tokens, longest_read
    )
    longest = Lengths(limits.max_searches, most_written, frame.num_tokens)
    for name, value, bound in zip(Lengths._fields, lengths, longest, strict=True):
        if value > bound:
            raise ValueError(
                f"--lengths: {name} = {value:g}, but the budgets of config.rollout "
                f"allow {bound:,}"
            )
    read = lengths.tokens - lengths.policy_tokens

    def rounds(tokens, max_tokens):
        # The chunks are those of the longest row, however short the rows are.
        return math.ceil(tokens / even_chunk(max_tokens, c.rollout.extend_chunk))

    longest_rows, likely_rows = (
        _rows_decoding(c, rollouts, n) for n in (longest.tokens, lengths.tokens)
    )
    shares = {
        "prefill": rounds(min(read, longest_prompt), longest_prompt)
        / rounds(longest_prompt, longest_prompt),
        "decode": (lengths.policy_tokens / longest.policy_tokens)
        * (longest_rows / likely_rows),
    }
    # Without a forced last turn, the results of the last search are not read.
    if most_read:
        num_reads = min(lengths.searches, limits.num_turns - 1)
        observation = min(read / (num_reads or 1), longest_read)
        shares["extend"] = (num_reads * rounds(observation, longest_read)) / (
            most_read * rounds(longest_read, longest_read)
        )
    # Several conversations share a row, and pieces without rows are skipped.
    num_rows = c.rl.micro_batch
    shards = frame.mesh.size // c.mesh.tensor
    rows_of_piece = piece_rows(num_rows, frame.num_tokens, shards)
    num_filled = math.ceil(num_rows / (frame.num_tokens // lengths.tokens))
    filled_pieces = math.ceil(num_filled / rows_of_piece)
    share = filled_pieces / math.ceil(num_rows / rows_of_piece)
    return shares | dict.fromkeys(LEARNING, share)
