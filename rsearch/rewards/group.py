"""The reward of a group: named terms checked, run, weighed and summed."""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Mapping

import numpy as np

from rsearch.rewards.terms import TERMS
from rsearch.text import NORMALIZERS
from rsearch.types import GenerateFn, Group, Outcome

WORDS = {  # settings of one word -> the words there are
    "normalize": tuple(NORMALIZERS),
    "indicator": ("executed", "tags"),
}


def reward_group(
    group: Group,
    terms: Mapping[str, Mapping],
    *,
    judge: GenerateFn | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray], Group]:
    """What each rollout of a group earns.

    Args:
        group: G rollouts of one question.
        terms: {name: {setting: value}}, with an optional "weight" (1) in each; as
            `check_terms` accepts them.
        judge: for the terms that ask one; None where there is none.

    Returns:
        totals: [G] float32, the weighted sum of the terms; 0 where the outcome is no
            learning signal.
        parts: {name: [G] float32}, each term before its weight; NaN where a judge
            could not be asked.
        group: the same, but a rollout with a NaN in a term that counts has the outcome
            JUDGE_ERROR.

    Raises:
        ValueError: a term asks a judge and there is none.
    """
    parts = {}
    totals = np.zeros(len(group.rollouts), np.float64)
    for name, settings in terms.items():
        settings = dict(settings)
        weight = settings.pop("weight", 1.0)
        term = TERMS[name]
        if "judge" in inspect.signature(term).parameters:
            if judge is None:
                raise ValueError(_no_judge(name))
            settings["judge"] = judge
        values = np.asarray(term(group.question, group.rollouts, **settings))
        assert values.shape == totals.shape, (name, values.shape, totals.shape)
        assert not np.isinf(values).any(), (name, values)
        parts[name] = values.astype(np.float32)
        if weight:  # a term of weight 0 is only watched, its NaN excludes nothing
            totals += weight * values
    rollouts = tuple(
        dataclasses.replace(rollout, outcome=Outcome.JUDGE_ERROR)
        if failed and rollout.outcome.is_signal
        else rollout
        for rollout, failed in zip(group.rollouts, np.isnan(totals), strict=True)
    )
    is_signal = np.array([r.outcome.is_signal for r in rollouts], bool)
    totals = np.where(is_signal, totals, 0.0).astype(np.float32)
    return totals, parts, dataclasses.replace(group, rollouts=rollouts)


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
            _check_value(field, setting, value, allowed[setting])
        for setting, default in allowed.items():
            if default is inspect.Parameter.empty and setting not in settings:
                raise ValueError(f"config.reward.{name}.{setting} is missing")
        if has_judge is False and needs_judge({name: settings}):
            raise ValueError(_no_judge(name))


def _settings(term):
    """{setting: default} of a term, its weight included."""
    parameters = inspect.signature(term).parameters.values()
    settings = {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name != "judge"
    }
    return {**settings, "weight": 1.0}


def _check_value(field, setting, value, default):
    """One value against the words of its setting, or the type of its default."""
    if setting in WORDS:
        words = WORDS[setting]
        right = "one of " + ", ".join(map(repr, words))
        is_right = value in words
    elif setting == "decimals":
        right = "None or an integer >= 0"
        is_right = value is None or (_is_integer(value) and value >= 0)
    elif isinstance(default, bool):
        right, is_right = "true or false", isinstance(value, bool)
    elif isinstance(default, int):
        right, is_right = "an integer >= 0", _is_integer(value) and value >= 0
    elif isinstance(default, str):
        right, is_right = "a text", isinstance(value, str) and value
    else:
        right = "a finite number"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and math.isfinite(value)
    if not is_right:
        raise ValueError(f"{field} = {value!r}: must be {right}")


def _is_integer(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _nearest(name, known):
    near = difflib.get_close_matches(str(name), list(known), 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there is {', '.join(sorted(known))}" if known else ""


def _no_judge(name):
    return f"config.reward.{name} asks a judge: name one in config.judge.source"
