"""What a rollout earns: the terms that a recipe names, weighs and sums.

A term is `(question, rollouts, **settings) -> [G]` floats. It sees all rollouts of one
question and by default reads what the policy itself wrote (`answer`, `policy_texts`)
and what the engine was asked (`searches`), never the decoded whole: no passage earns
anything. Where the public code of a paper reads otherwise, a setting of the term does
so too. NaN says that a judge was needed and could not be asked; `rsearch.rewards.group`
takes such a rollout out of learning.
"""

from rsearch.rewards.answers import answer_cover_em, answer_em, answer_f1
from rsearch.rewards.form import format_ok, overlong
from rsearch.rewards.r1_searcher import r1_searcher_format, searched
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
