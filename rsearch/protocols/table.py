"""The protocols by name; "package.module:name" names one of the user's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rsearch.protocols.base import Protocol
from rsearch.protocols.r1_searcher import R1_SEARCHER, R1_SEARCHER_CHAT
from rsearch.protocols.r1_searcher_pp import R1_SEARCHER_PP
from rsearch.protocols.rag_r1 import RAG_R1_MQ, RAG_R1_SQ
from rsearch.protocols.rearag import REARAG
from rsearch.protocols.research import RESEARCH, RESEARCH_BASE
from rsearch.protocols.tagged import R_SEARCH, SEARCH_R1
from rsearch.text.extension import check_callable, lookup
from rsearch.types import Answer, Malformed, Observation, ToolCall

FIELD = "config.protocol.name"
PROTOCOLS = {
    "search_r1": SEARCH_R1,
    "r_search": R_SEARCH,
    "rag_r1_sq": RAG_R1_SQ,
    "rag_r1_mq": RAG_R1_MQ,
    "r1_searcher": R1_SEARCHER,
    "r1_searcher_chat": R1_SEARCHER_CHAT,
    "r1_searcher_pp": R1_SEARCHER_PP,
    "rearag": REARAG,
    "research": RESEARCH,
    "research_base": RESEARCH_BASE,
}


def make_protocol(
    name: str,
    *,
    max_queries: int | None = None,
    quotes_keep_commas: bool = True,
    json_ascii: bool = False,
) -> Protocol:
    """Return the protocol of this name, with the settings of config.protocol.

    Args:
        name: a key of PROTOCOLS, or "package.module:name" of a Protocol.
        max_queries, quotes_keep_commas, json_ascii: passed to the protocol's
            `with_settings` unless they are the defaults; see `rag_r1.multi_query`.

    Raises:
        ValueError: there is no such protocol, it has no such settings, or a field of a
            user's protocol has a wrong value.
    """
    protocol = lookup(FIELD, name, PROTOCOLS)
    if not isinstance(protocol, Protocol):
        kind = type(protocol).__name__
        raise ValueError(
            f"{FIELD} = {name!r}: is of type {kind}: must be a "
            f"{Protocol.__module__}.Protocol"
        )
    if name not in PROTOCOLS:
        _check_fields(name, protocol)
    settings: dict[str, Any] = {}
    if max_queries:
        settings["max_queries"] = max_queries
    if not quotes_keep_commas:
        settings["quotes_keep_commas"] = False
    if json_ascii:
        settings["json_ascii"] = True
    if settings:
        if protocol.with_settings is None:
            entries = " and ".join(f"{k} = {v}" for k, v in settings.items())
            raise ValueError(
                f"config.protocol.{entries}: {FIELD} = {name!r} has no such settings"
            )
        protocol = protocol.with_settings(**settings)
    return protocol if name in PROTOCOLS else _with_checks(name, protocol)


def _check_fields(name: str, protocol: Protocol) -> None:
    """Refuse a user's protocol that has a wrong value in one of its fields."""
    p = protocol
    is_texts = isinstance(p.stop_strings, tuple | list) and all(
        isinstance(stop, str) and stop for stop in p.stop_strings
    )
    has_field = isinstance(p.user, str) and "{question}" in p.user
    is_message = isinstance(p.invalid_message, str | None)
    is_count = isinstance(p.max_queries, int) and p.max_queries >= 1
    for field, is_right, rule in (
        ("system", isinstance(p.system, str | None), "a text, or None"),
        ("user", has_field, "a text with {question}"),
        # Of a single text, each character would stop a turn.
        ("stop_strings", is_texts, "a tuple of texts that are not empty"),
        ("invalid_message", is_message, "a text, or None"),
        ("opening", isinstance(p.opening, str), "a text"),
        ("max_queries", is_count, "an integer >= 1"),
    ):
        if not is_right:
            raise ValueError(
                f"{FIELD} = {name!r}: {field} = {getattr(p, field)!r}: must be {rule}"
            )
    check_callable(FIELD, f"{name}.parse", p.parse, "(turn) -> action")
    check_callable(
        FIELD,
        f"{name}.show_passages",
        p.show_passages,
        "(queries, passages) -> observation",
    )
    check_callable(FIELD, f"{name}.render", p.render, "(action) -> text")
    check_callable(FIELD, f"{name}.write", p.write, "(step) -> text")


def _with_checks(name: str, protocol: Protocol) -> Protocol:
    """Return a user's protocol with the results of its functions checked."""
    action_types = (ToolCall, Answer, Malformed)
    return dataclasses.replace(
        protocol,
        parse=_check_result(action_types, f"{name}.parse", protocol.parse),
        show_passages=_check_result(
            (Observation,), f"{name}.show_passages", protocol.show_passages
        ),
        render=_check_result((str,), f"{name}.render", protocol.render),
        write=_check_result((str,), f"{name}.write", protocol.write),
    )


def _check_result(types: tuple[type, ...], name: str, function: Callable) -> Callable:
    """Return the function with a check that its result has one of these types.

    The fields of the result must have their types as well.
    """

    def call_checked(*args):
        result = function(*args)
        if not isinstance(result, types):
            type_names = " or ".join(kind.__name__ for kind in types)
            raise ValueError(
                f"{FIELD}: {name} returned {result!r}, a {type(result).__name__}: must "
                f"be a {type_names}"
            )
        match result:
            case ToolCall(_, arguments):
                # Of a text, each character would be an argument.
                is_right = isinstance(arguments, tuple)
                texts, rule = arguments, "its arguments must be a tuple of texts"
            case Answer(text):
                is_right, texts, rule = True, (text,), "its text must be a str"
            case Observation(before, content, after):
                is_right, texts = True, (before, content, after)
                rule = "before, content and after must be texts"
            case _:
                return result
        if not is_right or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{FIELD}: {name} returned {result!r}: {rule}")
        return result

    return call_checked
