"""The protocols by name."""

from rsearch.protocols.base import Protocol
from rsearch.protocols.r1_searcher import R1_SEARCHER, R1_SEARCHER_CHAT
from rsearch.protocols.r1_searcher_pp import R1_SEARCHER_PP
from rsearch.protocols.rag_r1 import RAG_R1_MQ, RAG_R1_SQ, multi_query
from rsearch.protocols.rearag import REARAG
from rsearch.protocols.tagged import R_SEARCH, SEARCH_R1

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
    """The protocol of this name, with what the public code does otherwise as settings.

    Args:
        name: a key of PROTOCOLS.
        max_queries, quotes_keep_commas, json_ascii: of rag_r1_mq, see `multi_query`;
            the others have one query a turn and no JSON.
    """
    if name != RAG_R1_MQ.name:
        return PROTOCOLS[name]
    return multi_query(
        quotes_keep_commas=quotes_keep_commas,
        json_ascii=json_ascii,
        max_queries=max_queries or RAG_R1_MQ.max_queries,
    )
