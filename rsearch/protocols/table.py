"""The protocols by name; "package.module:name" names one of the user's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rsearch.protocols.base import Protocol
from rsearch.protocols.r1_searcher import R1_SEARCHER, R1_SEARCHER_CHAT
from rsearch.protocols.r1_searcher_pp import R1_SEARCHER_PP
from rsearch.protocols.rag_r1 import RAG_R1_MQ, RAG_R1_SQ
from rsearch.protocols.rearag import REARAG
from rsearch.protocols.tagged import R_SEARCH, SEARCH_R1
from rsearch.text.extension import lookup
from rsearch.types import (
    Answer,
    Malformed,
    Observation,
    ToolCall,
)

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
        ValueError: there is no such protocol, or it has no such settings.
    """
    protocol = lookup(FIELD, name, PROTOCOLS)
    if not isinstance(protocol, Protocol):
        kind = type(protocol).__name__
        raise ValueError(
            f"{FIELD} = {name!r}: is a {kind}: must be a {Protocol.__module__}.Protocol"
        )
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


def _with_checks(name: str, protocol: Protocol) -> Protocol:
    """Return a user's protocol with its functions' return types checked."""
    action_types = (ToolCall, Answer, Malformed)
    return dataclasses.replace(
        protocol,
        parse=_check_result(action_types, f"{name}.parse", protocol.parse),
        show_passages=_check_result(
            (Observation,), f"{name}.show_passages", protocol.show_passages
        ),
    )


def _check_result(types: tuple[type, ...], name: str, function: Callable) -> Callable:
    """Return the function with a check that its result has one of these types."""

    def call_checked(*args):
        result = function(*args)
        if not isinstance(result, types):
            type_names = " or ".join(kind.__name__ for kind in types)
            raise ValueError(
                f"{FIELD}: {name} returned {result!r}, a {type(result).__name__}: must "
                f"be a {type_names}"
            )
        # Of a text, each character would be an argument.
        if isinstance(result, ToolCall) and isinstance(result.arguments, str):
            raise ValueError(
                f"{FIELD}: {name} returned {result!r}: its arguments must be a tuple"
            )
        return result

    return call_checked
