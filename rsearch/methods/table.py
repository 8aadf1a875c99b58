"""Find methods by name; "package.module:name" names one of the user's own."""

import contextlib
import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Collection, Sequence, Set

from rsearch.llm.requests import Request, Score
from rsearch.methods.adaptive import (
    STRATEGIES,
    adaptive_rag,
    labels_digest,
    labels_of,
    skr,
)
from rsearch.methods.base import (
    Kit,
    Note,
    NotLoadedError,
    Program,
    check_requests,
    check_top_k,
    check_unlabelled,
)
from rsearch.methods.conversing import converse
from rsearch.methods.cr_planner import (
    cr_planner,
    label_actions,
    read_action_labels,
)
from rsearch.methods.flare import PROBE as FLARE_PROBE
from rsearch.methods.flare import flare
from rsearch.methods.in_context import in_context
from rsearch.methods.iterating import ircot, iter_retgen
from rsearch.methods.longllmlingua import longllmlingua
from rsearch.methods.names import OTHER_METHODS, split_name
from rsearch.methods.rag_rerank import rag_rerank
from rsearch.methods.reading import cot, direct, rag, rag_cot
from rsearch.methods.rearter import label_steps, read_step_labels, rearter
from rsearch.methods.recomp import (
    label_sentences,
    read_sentence_labels,
    recomp_extractive,
)
from rsearch.methods.replug import PROBE as REPLUG_PROBE
from rsearch.methods.replug import replug
from rsearch.methods.search_o1 import search_o1
from rsearch.methods.searchain import searchain
from rsearch.methods.selective_context import selective_context
from rsearch.methods.self_ask import self_ask
from rsearch.methods.self_rag import check_tokens, self_rag
from rsearch.methods.sure import sure
from rsearch.text.extension import lookup
from rsearch.text.spelling import did_you_mean

FIELD = "config.eval.methods"
METHODS: dict[str, Program] = {
    "direct": direct,
    "cot": cot,
    "rag": rag,
    "rag_cot": rag_cot,
    "iter_retgen": iter_retgen,
    "ircot": ircot,
    "self_ask": self_ask,
    "sure": sure,
    "search_o1": search_o1,
    "searchain": searchain,
    "replug": replug,
    "rag_rerank": rag_rerank,
    "selective_context": selective_context,
    "longllmlingua": longllmlingua,
    "flare": flare,
    "converse": converse,
    "in_context": in_context,
    "skr": skr,
    "adaptive_rag": adaptive_rag,
    "recomp_extractive": recomp_extractive,
    "self_rag": self_rag,
    "rearter": rearter,
    "cr_planner": cr_planner,
}
# Functions that read the labels of methods that learn from labels made for them.
READ_LABELS: dict[str, Callable[[str], Sequence]] = {
    "recomp_extractive": read_sentence_labels,
    "rearter": read_step_labels,
    "cr_planner": read_action_labels,
}
# Methods that need more than a question and a search.
NEEDS_EXTRA_INPUTS = ("in_context", *STRATEGIES, "self_rag", *READ_LABELS)
ALL = "all"  # the policy's own protocol and every method that needs no more
# Settings that count the samples that a method compares.
SAMPLES = {"rearter": "paths", "cr_planner": "candidates"}
# (request, the methods that need it of an endpoint, besides texts).
PROBES: tuple[tuple[Request, Set[str]], ...] = (
    (
        Score("", "Question:"),
        {"selective_context", "longllmlingua", "rag_rerank", "self_rag"},
    ),
    (FLARE_PROBE, {"flare", "self_rag"}),
    (REPLUG_PROBE, {"replug"}),
)
# {flag of rsearch.evaluate: (program that makes labels, method that learns from them)}.
LABELS: dict[str, tuple[Program, str]] = {
    "label_sentences": (label_sentences, "recomp_extractive"),
    "label_steps": (label_steps, "rearter"),
    "label_actions": (label_actions, "cr_planner"),
}


def expand_all(methods: Sequence[str]) -> list[str]:
    """Return the methods, with those that `ALL` stands for in its place.

    A method that is also named by itself, perhaps with settings, is not repeated.
    """
    methods = [method.strip() for method in methods]
    named = {split_name(method)[0] for method in methods}
    general = [name for name in METHODS if name not in NEEDS_EXTRA_INPUTS]
    general = [name for name in ("protocol", *general) if name not in named]
    expanded = [general if method == ALL else [method] for method in methods]
    return [name for names in expanded for name in names]


def demanded_inputs(
    methods: Sequence[str],
    control_tokens: Collection[str] = (),
    questions: Sequence = (),
) -> dict[str, str]:
    """Check what methods need besides a question and a search.

    Args:
        questions: the Questions to answer, none of which may be labelled.

    Returns:
        {name: digest} of the files that the methods read. If a method is named with
        several files, their digests are joined.

    Raises:
        ValueError: labels cannot be used, a question is labelled, or the tokenizer
            lacks reflection tokens.
    """
    digests: dict[str, list[str]] = {}
    for spelling in methods:
        name, _ = split_name(spelling)
        if needs_control_tokens(spelling):
            check_tokens(control_tokens)
        elif name in STRATEGIES or name in READ_LABELS:
            settings = make_program(spelling).keywords
            path = settings.get("labels", "")
            if name in STRATEGIES:
                labels = labels_of(name, path, settings.get("dataset", ""))
            else:
                labels = READ_LABELS[name](path)
            check_unlabelled(questions, {x.question for x in labels})
            digests.setdefault(name, []).append(labels_digest(labels))
    return {f"eval.{n}": " ".join(dict.fromkeys(x)) for n, x in digests.items()}


def check_methods(methods: Sequence[str], questions: Sequence, kit: Kit) -> None:
    """Refuse settings that a method refuses when it starts to answer a question.

    An evaluation's later methods start hours after its first. Each program is run up to
    its first requests, or until it calls a function of the kit that raises
    NotLoadedError.

    Args:
        questions: Questions, the first of which is used, without its golden answers.

    Raises:
        ValueError: names the method, and the setting or the request.
    """
    question = dataclasses.replace(questions[0], golden_answers=())
    for spelling in methods:
        name, _ = split_name(spelling)
        if name in OTHER_METHODS:
            continue
        program = make_program(spelling)
        try:
            if name in METHODS:  # some search only later
                check_top_k(program.keywords.get("top_k") or None, kit)
            with contextlib.closing(program(question, kit)) as steps:
                requests = next((r for r in steps if not isinstance(r, Note)), [])
            is_list = isinstance(requests, list | tuple)
            check_requests(requests if is_list else [requests], kit)
        except NotLoadedError:
            continue
        except ValueError as error:
            # The same error: one of a user's method must keep its traceback.
            error.args = (f"{FIELD} = {spelling!r}: {error}",)
            raise


def probes_of(
    methods: Sequence[str], *, has_scorer: bool = False
) -> list[tuple[Request, list[str]]]:
    """Return requests that an endpoint must be able to answer for these methods.

    With a scorer, another model scores texts for the endpoint.

    Returns:
        (request, the methods that need its answer) of each.
    """
    probes = [
        (probe, [x for x in methods if split_name(x)[0] in needed_by])
        for probe, needed_by in PROBES
        if not (has_scorer and isinstance(probe, Score))
    ]
    return [(probe, needed_by) for probe, needed_by in probes if needed_by]


def needs_control_tokens(spelling: str) -> bool:
    """Return whether a method's marks must be control tokens, not text."""
    name, _ = split_name(spelling)
    return name == "self_rag" and not make_program(spelling).keywords.get("spelled")


def needs_samples(spelling: str) -> bool:
    """Return whether a method compares samples, which greedy answers are not."""
    name, _ = split_name(spelling)
    return name in SAMPLES and make_program(spelling).keywords.get(SAMPLES[name]) != 1


def make_program(spelling: str) -> Program:
    """Return a method with its settings.

    Args:
        spelling: key of METHODS, or "package.module:name" of a program, followed by any
            number of ":setting=value". Settings are keyword arguments of the method,
            see its docstring. A value has the type of the argument's default; if the
            annotation is a Literal, it is one of the listed values.

    Raises:
        ValueError: there is no such method, its arguments are not those of a program,
            it has no such setting, or the value has the wrong type or is not listed.
    """
    name, settings = split_name(spelling)
    if name in OTHER_METHODS:
        raise ValueError(f"{FIELD} = {spelling!r}: {name} has no settings")
    program = lookup(FIELD, name, {**dict.fromkeys(OTHER_METHODS), **METHODS})
    if not inspect.isgeneratorfunction(program):
        raise ValueError(
            f"{FIELD} = {name!r}: not a generator function (question, kit, **settings)"
        )
    signature = inspect.signature(program)
    try:
        signature.bind("question", "kit")
    except TypeError as error:  # a setting without a default is one reason
        raise ValueError(
            f"{FIELD} = {name!r}: cannot be called as (question, kit): {error}"
        ) from None
    accepted = {
        parameter.name: parameter
        for i, parameter in enumerate(signature.parameters.values())
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY
        or (parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD and i > 1)
    }
    values = {}
    for assignment in settings:
        setting, _, text = assignment.partition("=")
        if setting not in accepted:
            hint = did_you_mean(setting, accepted)
            raise ValueError(
                f"{FIELD} = {spelling!r}: {name} has the settings "
                f"{', '.join(accepted) or 'none'}, not {setting!r}{hint}"
            )
        value = _parse(spelling, setting, text, type(accepted[setting].default))
        if name in METHODS and type(value) is int and value < 0:
            raise ValueError(
                f"{FIELD} = {spelling!r}: {setting} = {text!r}: must be 0 or more"
            )
        choices = typing.get_args(accepted[setting].annotation)
        if choices and value not in choices:
            raise ValueError(
                f"{FIELD} = {spelling!r}: {setting} = {text!r}: must be "
                f"{' or '.join(map(str, choices))}{did_you_mean(text, choices)}"
            )
        values[setting] = value
    return functools.partial(program, **values)


def method_settings(spelling: str) -> dict[str, int | float | str | None]:
    """Return the values of all settings of a method, also of those with defaults.

    A default of a user's method that is neither text nor a number is left out: its text
    may differ from process to process, and its code has a fingerprint.

    Raises:
        ValueError: see `make_program`.
    """
    if split_name(spelling)[0] in OTHER_METHODS:
        return {}
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(make_program(spelling)).parameters.values()
        if parameter.default is not inspect.Parameter.empty
    }
    return {
        # JSON has no infinity.
        name: str(value) if value in (math.inf, -math.inf) else value
        for name, value in defaults.items()
        if isinstance(value, str | int | float | None)
    }


def _parse(spelling: str, setting: str, text: str, kind: type) -> int | float | str:
    """Return a setting's value, parsed as the type of its default."""
    if kind is bool and text in ("true", "false"):
        return text == "true"
    if kind is str:
        return text
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if kind is int or not math.isnan(value):
                return value
    expected = {
        bool: "must be true or false",
        int: "must be a whole number",
        float: "must be a number",
    }.get(kind, f"cannot be given: its default is a {kind.__name__}")
    raise ValueError(f"{FIELD} = {spelling!r}: {setting} = {text!r}: {expected}")
