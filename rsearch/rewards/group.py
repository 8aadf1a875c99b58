"""Compute the reward of a group: check, run, weight and sum named terms."""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from rsearch.protocols.base import Protocol
from rsearch.rewards.terms import SETTING_CHECKS, TERMS
from rsearch.text.extension import SPELLING, check_callable, lookup
from rsearch.text.spelling import did_you_mean
from rsearch.types import GenerateFn, Group, Outcome, RewardTerm

WEIGHT = inspect.Parameter(
    "weight", inspect.Parameter.KEYWORD_ONLY, default=1.0, annotation=float
)
TERM = inspect.Parameter(
    "term", inspect.Parameter.KEYWORD_ONLY, default="", annotation=str
)
RUN_ARGUMENTS = ("judge", "protocol")  # arguments from the run, not the configuration
MAX_VALUE = float(np.finfo(np.float32).max)  # rewards are float32
SIGNATURE = "(question, rollouts, **settings) -> [G] numbers"
PLAIN_VALUES = "text, a number, true or false, None, or a tuple of these"


def reward_groups(
    groups: Sequence[Group],
    terms: Mapping[str, Mapping],
    *,
    protocol: Protocol | None = None,
    judge: GenerateFn | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[Group, ...]]:
    """Return each rollout's reward; a term calls the judge once for all groups.

    Args:
        groups: Q groups of G rollouts.
        terms: {name: {setting: value}} as accepted by `check_terms`. Each may have a
            "weight" (default 1) and a "term" (default: the name).
        protocol: protocol of the rollouts, for terms that take one.
        judge: judge for terms that call one; None if there is none.

    Returns:
        totals: [Q, G] float32, the weighted sum of the terms; 0 where the outcome is no
            learning signal.
        parts: {name: [Q, G] float32}, each term before weighting; NaN where a call of
            the judge failed.
        groups: the groups; a rollout with a NaN in a term of nonzero weight now has the
            outcome JUDGE_ERROR.

    Raises:
        ValueError: a term asks a judge and there is none, or returns something other
            than a number for each rollout.
    """
    shape = (len(groups), len(groups[0].rollouts) if groups else 0)
    groups, values_by_name = tuple(groups), {}
    # Terms with a judge come first: a term about the whole group must not count the
    # rollouts on which the judge failed.
    for name in sorted(terms, key=lambda name: not needs_judge({name: terms[name]})):
        values = _term_values(name, terms[name], groups, shape, protocol, judge)
        values_by_name[name] = values
        if terms[name].get("weight", 1.0):
            groups = tuple(map(_mark_failed, groups, np.isnan(values)))
    parts, totals = {}, np.zeros(shape, np.float64)
    for name, settings in terms.items():
        parts[name] = values_by_name[name].astype(np.float32)
        weight = settings.get("weight", 1.0)
        if weight:  # a term of weight 0 is only recorded: its NaN excludes nothing
            totals += weight * values_by_name[name]
    is_signal = [[r.outcome.is_signal for r in group.rollouts] for group in groups]
    is_signal = np.array(is_signal, bool).reshape(totals.shape)
    return np.where(is_signal, totals, 0.0).astype(np.float32), parts, groups


def _term_values(name, settings, groups, shape, protocol, judge) -> np.ndarray:
    """Return the [Q, G] float64 values of a term; see `reward_groups`."""
    term = term_of(name, settings)
    settings = {k: v for k, v in settings.items() if k not in ("weight", "term")}
    parameters = inspect.signature(term).parameters
    if "protocol" in parameters:
        assert protocol is not None, name
        settings["protocol"] = protocol
    run_term = functools.partial(term, **settings)
    if "judge" not in parameters:
        values = [run_term(group.question, group.rollouts) for group in groups]
    elif judge is None:
        raise ValueError(_no_judge_message(name))
    else:
        values = _run_with_judge(name, run_term, groups, judge)
    values = [
        _check_values(
            name, term, group_values, shape[1], may_be_nan="judge" in parameters
        )
        for group_values in values
    ]
    return np.array(values, np.float64).reshape(shape)


def term_of(name: str, settings: Mapping) -> RewardTerm:
    """Return the function of a term of config.reward.

    Args:
        name: key of the term there, and in metrics.
        settings: section of the term; "term" names the function if the key does not.

    Raises:
        ValueError: there is no such function.
    """
    if "term" in settings:
        field, reference = f"config.reward.{name}.term", settings["term"]
        term = lookup(field, reference, TERMS)
        check_callable(field, reference, term, SIGNATURE)
        return term
    if name not in TERMS:
        hint = _suggestion(name, TERMS)
        raise ValueError(
            f"unknown reward term config.reward.{name}{hint}; to use a function of "
            f"yours, set config.reward.{name}.term = {SPELLING}"
        )
    return TERMS[name]


def _check_values(name, term, values, count, *, may_be_nan) -> list[float]:
    """Return the values of one group, which must be `count` numbers.

    A user's function may return anything. The error names the function here, before bad
    values cause an error in numpy or the optimizer, far from their origin.
    """
    function = f"{term.__module__}:{getattr(term, '__qualname__', term)}"
    failure = f"config.reward.{name}: {function} returned"
    # An array without axes has a __len__, which fails.
    is_single = isinstance(values, str | bytes) or getattr(values, "shape", None) == ()
    # The keys of a dict, or a set, would be taken for values in any order.
    is_unordered = isinstance(values, Mapping | Set)
    if is_single or is_unordered or not hasattr(values, "__len__"):
        kind = type(values).__name__
        raise ValueError(f"{failure} {values!r}, a {kind}: must be {count} numbers")
    if len(values) != count:
        raise ValueError(
            f"{failure} {len(values)} values for {count} rollouts: must be one for each"
        )
    numbers = []
    for value in values:
        is_number = hasattr(value, "__float__") and np.ndim(value) == 0
        if isinstance(value, str | bytes) or not is_number:
            raise ValueError(f"{failure} {value!r} among its values: must be numbers")
        try:
            number = float(value)
        except OverflowError:  # an integer
            number = math.inf
        if abs(number) > MAX_VALUE or (math.isnan(number) and not may_be_nan):
            raise ValueError(
                f"{failure} {number} among its values: must be finite in float32"
            )
        numbers.append(number)
    return numbers


def _run_with_judge(
    name: str, run_term: Callable, groups, judge: GenerateFn
) -> list[list[float]]:
    """Return [Q] lists of [G] values of a term, judging all of its chats in one call.

    A term is a pure function of the replies to its chats. It runs once to collect the
    chats of all groups and once more with the replies: together the chats may fill a
    batch or a connection pool, which those of a single group would not.
    """
    collected = [[] for _ in groups]
    for group, chats in zip(groups, collected, strict=True):
        run_term(
            group.question, group.rollouts, judge=functools.partial(_collect, chats)
        )
    all_chats = [chat for chats in collected for chat in chats]
    replies = judge(all_chats) if all_chats else []
    assert len(replies) == len(all_chats), (len(replies), len(all_chats))
    values, start = [], 0
    for group, chats in zip(groups, collected, strict=True):
        group_replies = replies[start : start + len(chats)]
        start += len(chats)

        def replay(requests, chats=chats, group_replies=group_replies):
            if list(requests) != chats:
                raise ValueError(
                    f"config.reward.{name}: must call its judge once, with chats that "
                    "do not depend on replies: it runs twice, first without replies"
                )
            return group_replies

        values.append(run_term(group.question, group.rollouts, judge=replay))
    return values


def _collect(chats, requests):
    """Append a judge's requests to `chats`, and reply None to each."""
    chats.extend(requests)
    return [None] * len(requests)


def _mark_failed(group, failures):
    """Return the group, with the outcome JUDGE_ERROR for rollouts that failed."""
    rollouts = tuple(
        dataclasses.replace(rollout, outcome=Outcome.JUDGE_ERROR)
        if is_failed and rollout.outcome.is_signal
        else rollout
        for rollout, is_failed in zip(group.rollouts, failures, strict=True)
    )
    return dataclasses.replace(group, rollouts=rollouts)


def needs_judge(terms: Mapping[str, Mapping]) -> bool:
    """Return whether one of these terms calls a judge."""
    functions = [term_of(name, settings) for name, settings in terms.items()]
    return any("judge" in inspect.signature(f).parameters for f in functions)


def check_terms(terms: Mapping[str, Mapping], *, has_judge: bool | None = None) -> None:
    """Refuse terms that could not be run.

    Args:
        terms: {name: {setting: value}}, as in a recipe's `reward`.
        has_judge: whether there is a judge; None leaves that unchecked.

    Raises:
        ValueError: an unknown name (the message has the nearest known one), a missing
            one, or a value out of range.
    """
    if not terms:
        raise ValueError("config.reward is empty: name at least one term")
    for name, settings in terms.items():
        if not hasattr(settings, "items"):
            entry = f"config.reward.{name} = {settings!r}"
            raise ValueError(f"{entry}: must be a dict of settings")
        if f"_{name}".endswith("_seconds"):
            raise ValueError(
                f"config.reward.{name}: its metric would be reward_{name}, but metrics "
                "that end in _seconds are times: call the term something else"
            )
        term = term_of(name, settings)
        allowed, takes_any = _setting_parameters(f"config.reward.{name}", term)
        for setting, value in settings.items():
            field = f"config.reward.{name}.{setting}"
            if setting not in allowed and (not takes_any or setting in RUN_ARGUMENTS):
                raise ValueError(
                    f"unknown setting {field}{_suggestion(setting, allowed)}"
                )
            kind = allowed[setting].annotation if setting in allowed else WEIGHT.empty
            # Integers of built-in terms are counts; a user's may be negative.
            lowest = 0 if term in TERMS.values() else None
            _check_value(field, value, kind, lowest)
        for setting, parameter in allowed.items():
            if parameter.default is parameter.empty and setting not in settings:
                raise ValueError(f"config.reward.{name}.{setting} is missing")
        if term in SETTING_CHECKS:
            SETTING_CHECKS[term](f"config.reward.{name}", settings)
        if has_judge is False and needs_judge({name: settings}):
            raise ValueError(_no_judge_message(name))


def _setting_parameters(field, term) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return {setting: parameter} of a term, and whether it also takes any other.

    Raises:
        ValueError: a setting of the term has the name of a setting of every term.
    """
    try:
        signature = inspect.signature(term, eval_str=True)
    except NameError:  # an annotation in quotes with an undefined name
        signature = inspect.signature(term)
    parameters = list(signature.parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keyword_parameters = [
        p
        for i, p in enumerate(parameters)
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and i > 1)
    ]
    settings = {p.name: p for p in keyword_parameters if p.name not in RUN_ARGUMENTS}
    common_settings = {"weight": WEIGHT, "term": TERM}
    if conflicts := sorted(settings.keys() & common_settings):
        raise ValueError(
            f"{field}: the function {term.__name__} has an argument {conflicts[0]!r}, "
            "which is a setting of every term: call it something else"
        )
    return {**settings, **common_settings}, takes_any


def _check_value(field, value, kind, lowest):
    """Refuse a value that its setting's annotation does not allow.

    Args:
        field: name of the setting, for messages.
        value: value from the configuration.
        kind: the annotation; if it is not a plain type, it allows all of them.
        lowest: smallest integer allowed, or None.
    """
    if typing.get_origin(kind) is typing.Literal:
        words = typing.get_args(kind)
        rule, is_allowed = "one of " + ", ".join(map(repr, words)), value in words
    else:
        is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
        kinds = typing.get_args(kind) if is_union else (kind,)
        rules, fits = zip(*(_match_kind(value, k, lowest) for k in kinds), strict=True)
        is_allowed = any(fits)
        rule = " or ".join(sorted(rules, key=lambda text: text != "None"))
    if not is_allowed:
        raise ValueError(f"{field} = {value!r}: must be {rule}")


def _match_kind(value, kind, lowest) -> tuple[str, bool]:
    """Return (the values that a plain type allows, whether this is one of them)."""
    if kind in (None, type(None)):
        return "None", value is None
    if kind is bool:
        return "true or false", isinstance(value, bool)
    if kind is str:
        return "text", isinstance(value, str)
    if kind is int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if lowest is None:
            return "an integer", is_integer
        return f"an integer >= {lowest}", is_integer and value >= lowest
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_finite = is_number and abs(value) <= MAX_VALUE
        return "a finite float32 number", is_finite
    if kind in (tuple, list) or typing.get_origin(kind) in (tuple, list):
        return "a tuple", isinstance(value, tuple | list) and _is_plain(value)
    return PLAIN_VALUES, _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Return whether a configuration can hold this value and print it as JSON."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def _suggestion(name, names):
    if hint := did_you_mean(str(name), names):
        return hint
    return f"; there is {', '.join(sorted(names))}" if names else ""


def _no_judge_message(name):
    return f"config.reward.{name} asks a judge: name one in config.models.judge.source"
