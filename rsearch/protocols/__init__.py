"""The protocols by name."""

from rsearch.protocols.tagged import R_SEARCH, SEARCH_R1

PROTOCOLS = {
    "search_r1": SEARCH_R1,
    "r_search": R_SEARCH,
}
