"""Reward terms by name.

A term is `(question, rollouts, **settings) -> [G]` floats. It sees all rollouts of one
question and by default reads what the policy itself wrote (`answer`, `policy_texts`)
and what it searched for (`searches`), never the decoded whole: no passage earns
anything. Where the public code of a paper reads otherwise, a setting of the term does
so too. A term with an argument `judge` asks that model, and returns NaN where it could
not be asked: `rsearch.rewards.group` takes such a rollout out of learning. One with an
argument `protocol` is given the protocol of the rollouts.
"""

from rsearch.rewards.answers import answer_cover_em, answer_em, answer_f1
from rsearch.rewards.form import check_overlong, format_ok, overlong
from rsearch.rewards.r1_searcher import check_letters, r1_searcher_format, searched
from rsearch.rewards.r1_searcher_pp import group_fewest_searches, r1_searcher_pp_format
from rsearch.rewards.r_search import evidence_f1, r_search_format
from rsearch.rewards.search_r1 import search_r1_structure

TERMS = {
    "answer_em": answer_em,
    "answer_f1": answer_f1,
    "answer_cover_em": answer_cover_em,
    "format_ok": format_ok,
    "overlong": overlong,
    "search_r1_structure": search_r1_structure,
    "searched": searched,
    "r1_searcher_format": r1_searcher_format,
    "r1_searcher_pp_format": r1_searcher_pp_format,
    "group_fewest_searches": group_fewest_searches,
    "evidence_f1": evidence_f1,
    "r_search_format": r_search_format,
}

# term -> (field, settings) -> None: refuses settings that their types alone allow.
SETTING_CHECKS = {overlong: check_overlong, r1_searcher_format: check_letters}
