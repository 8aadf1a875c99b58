"""The reward of a group: named terms checked, run, weighed and summed."""

import dataclasses
import difflib
import functools
import inspect
import math
import typing
from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.rewards.r1_searcher import CHECKS
from rsearch.rewards.terms import TERMS
from rsearch.types import GenerateFn, Group, Outcome

WEIGHT = inspect.Parameter(
    "weight", inspect.Parameter.KEYWORD_ONLY, default=1.0, annotation=float
)


def reward_group(
    group: Group,
    terms: Mapping[str, Mapping],
    *,
    judge: GenerateFn | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray], Group]:
    """What each rollout of one group earns: `reward_groups` of it alone.

    Returns:
        [G] totals, {name: [G]} parts, the group.
    """
    totals, parts, groups = reward_groups([group], terms, judge=judge)
    return totals[0], {name: values[0] for name, values in parts.items()}, groups[0]


def reward_groups(
    groups: Sequence[Group],
    terms: Mapping[str, Mapping],
    *,
    judge: GenerateFn | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[Group, ...]]:
    """What each rollout of some groups earns; each term asks the judge once for all.

    Args:
        groups: Q groups of G rollouts.
        terms: {name: {setting: value}}, with an optional "weight" (1) in each; as
            `check_terms` accepts them.
        judge: for the terms that ask one; None where there is none.

    Returns:
        totals: [Q, G] float32, the weighted sum of the terms; 0 where the outcome is no
            learning signal.
        parts: {name: [Q, G] float32}, each term before its weight; NaN where a judge
            could not be asked.
        groups: the same, but a rollout with a NaN in a term that counts has the outcome
            JUDGE_ERROR.

    Raises:
        ValueError: a term asks a judge and there is none.
    """
    shape = (len(groups), len(groups[0].rollouts) if groups else 0)
    parts, totals = {}, np.zeros(shape, np.float64)
    for name, settings in terms.items():
        settings = dict(settings)
        weight = settings.pop("weight", 1.0)
        if not needs_judge({name: settings}):
            term = functools.partial(TERMS[name], **settings)
            values = [term(group.question, group.rollouts) for group in groups]
        elif judge is None:
            raise ValueError(_no_judge(name))
        else:
            values = _judged(name, settings, groups, judge)
        values = np.asarray(values, np.float64) if groups else np.zeros(shape)
        assert values.shape == totals.shape, (name, values.shape, totals.shape)
        assert not np.isinf(values).any(), (name, values)
        parts[name] = values.astype(np.float32)
        if weight:  # a term of weight 0 is only watched, its NaN excludes nothing
            totals += weight * values
    groups = tuple(map(_without_failed, groups, np.isnan(totals)))
    is_signal = [[r.outcome.is_signal for r in group.rollouts] for group in groups]
    is_signal = np.array(is_signal, bool).reshape(totals.shape)
    return np.where(is_signal, totals, 0.0).astype(np.float32), parts, groups


def _judged(name, settings, groups, judge):
    """[Q] lists of [G]: the values of a term whose chats all go to the judge at once.

    A term is a pure function of the replies to its chats. It runs once for its chats to
    be heard and once more with the replies, which may fill a batch or a connection pool
    that the chats of a single group would not.
    """
    term = functools.partial(TERMS[name], **settings)
    heard = [[] for _ in groups]
    for group, chats in zip(groups, heard, strict=True):
        term(group.question, group.rollouts, judge=functools.partial(_hear, chats))
    flat = [chat for chats in heard for chat in chats]
    replies = judge(flat) if flat else []
    assert len(replies) == len(flat), (len(replies), len(flat))
    values, start = [], 0
    for group, chats in zip(groups, heard, strict=True):
        own = replies[start : start + len(chats)]
        start += len(chats)

        def replay(asked, chats=chats, own=own):
            assert asked == chats, "the term asks otherwise than it did"
            return own

        values.append(term(group.question, group.rollouts, judge=replay))
    return values


def _hear(chats, asked):
    """A judge that writes down what it is asked and fails."""
    chats.extend(asked)
    return [None] * len(asked)


def _without_failed(group, failed):
    """The group, whose rollouts with a NaN are judge errors."""
    rollouts = tuple(
        dataclasses.replace(rollout, outcome=Outcome.JUDGE_ERROR)
        if is_failed and rollout.outcome.is_signal
        else rollout
        for rollout, is_failed in zip(group.rollouts, failed, strict=True)
    )
    return dataclasses.replace(group, rollouts=rollouts)


def needs_judge(terms: Mapping[str, Mapping]) -> bool:
    """Whether one of these terms asks a judge."""
    return any("judge" in inspect.signature(TERMS[name]).parameters for name in terms)


def check_terms(terms: Mapping[str, Mapping], *, has_judge: bool | None = None) -> None:
    """Refuses terms that could not be run.

    Args:
        terms: {name: {setting: value}}, as a recipe's `reward` has them.
        has_judge: whether there is a judge; None leaves that unchecked.

    Raises:
        ValueError: an unknown or missing name, with the nearest right one, or a value
            out of range.
    """
    if not terms:
        raise ValueError("config.reward is empty: name at least one term")
    for name, settings in terms.items():
        if name not in TERMS:
            near = _nearest(name, TERMS)
            raise ValueError(f"unknown reward term config.reward.{name}{near}")
        if not hasattr(settings, "items"):
            shown = f"config.reward.{name} = {settings!r}"
            raise ValueError(f"{shown}: must be a dict of settings")
        allowed = _settings(TERMS[name])
        for setting, value in settings.items():
            field = f"config.reward.{name}.{setting}"
            if setting not in allowed:
                near = _nearest(setting, allowed)
                raise ValueError(f"unknown setting {field}{near}")
            _check_value(field, setting, value, allowed[setting].annotation)
        for setting, parameter in allowed.items():
            if parameter.default is parameter.empty and setting not in settings:
                raise ValueError(f"config.reward.{name}.{setting} is missing")
        _check_together(name, settings)
        if has_judge is False and needs_judge({name: settings}):
            raise ValueError(_no_judge(name))


def _settings(term):
    """{setting: parameter} of a term, its weight included."""
    parameters = inspect.signature(term).parameters.values()
    settings = {
        p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "judge"
    }
    return {**settings, "weight": WEIGHT}


def _check_value(field, setting, value, kind):
    """One value against the annotation of its setting."""
    if typing.get_origin(kind) is typing.Literal:
        words = typing.get_args(kind)
        right = "one of " + ", ".join(map(repr, words))
        is_right = value in words
    elif setting == "checks":
        right = f"some of the letters a to g, or one of {', '.join(CHECKS)}"
        letters = CHECKS.get(value, value) if isinstance(value, str) else ""
        is_right = bool(letters) and set(letters) <= set("abcdefg")
    elif kind is bool:
        right, is_right = "true or false", isinstance(value, bool)
    elif kind in (int, int | None):
        is_optional = kind is not int
        right = "None or an integer >= 0" if is_optional else "an integer >= 0"
        is_right = (_is_integer(value) and value >= 0) or (
            is_optional and value is None
        )
    else:
        assert kind is float, (field, kind)
        right = "a finite number"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and math.isfinite(value)
    if not is_right:
        raise ValueError(f"{field} = {value!r}: must be {right}")


def _check_together(name, settings):
    """Settings that must fit together."""
    if name == "overlong":
        buffer, most = settings["buffer_tokens"], settings["max_tokens"]
        if not 1 <= buffer <= most:
            raise ValueError(
                f"config.reward.overlong.buffer_tokens = {buffer}: must be from 1 to "
                f"max_tokens = {most}"
            )


def _is_integer(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _nearest(name, known):
    near = difflib.get_close_matches(str(name), list(known), 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there is {', '.join(sorted(known))}" if known else ""


def _no_judge(name):
    return f"config.reward.{name} asks a judge: name one in config.judge.source"
