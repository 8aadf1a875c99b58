"""Reward terms by name.

A term is `(question, rollouts, **settings) -> [G]` floats. It receives all rollouts of
one question and by default reads what the policy itself wrote (`answer`,
`policy_texts`) and what it searched for (`searches`), but never the whole decoded text,
so no passage earns anything. If a paper's public code reads more, a setting of the term
does so as well. A term with an argument `judge` calls that model and returns NaN where
the call fails; `rsearch.rewards.group` excludes such a rollout from learning, and gives
it the outcome JUDGE_ERROR before the terms without a judge run. A term with an argument
`protocol` receives the protocol of the rollouts.
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

# term -> (field, settings) -> None, which refuses bad settings that types would allow.
SETTING_CHECKS = {overlong: check_overlong, r1_searcher_format: check_letters}
