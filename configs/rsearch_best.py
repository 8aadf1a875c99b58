"""The best of what was tried on the embedded world: RAG-R1, reinforced for longer.

    python -m rsearch.train --config=configs/rsearch_best.py --dry_run
    python -m rsearch.train --config=configs/rsearch_best.py:tiny --workdir=runs/best

RAG-R1 gives the parallel queries of a turn, the supervised stage in four kinds of
segments, and reinforcement by PPO from questions that were wrong and answerable, with a
quarter of the right ones. Here it has twice the steps and DAPO's higher upper clip
(arXiv 2503.14476), and a rollout with a malformed turn or a forged passage loses what a
right answer earns. docs/results.md has what else was tried.

Words after the colon: `twice` filters the questions again after half of the steps, by
what the policy then gets wrong; `grpo` compares rollouts of a question, rewards right
ones that searched least (R1-Searcher++) and samples dynamically (DAPO); `no_format` and
`no_clip_higher` leave one of these out; `sq` asks one query a turn; `tiny` is the
embedded world.
"""

from ml_collections import ConfigDict

from configs import rag_r1, variants

TEACHER = ("model", "mesh")  # what a data stage sets for one
FLAGS = ("twice", "grpo", "no_format", "no_clip_higher", "sq", "tiny")


def get_config(variant=""):
    """The recipe; the words of `variant` are above."""
    words = variants.chosen(variant, flags=FLAGS)
    algorithm = "grpo" if words.grpo else "ppo"
    base = ["sq" if words.sq else "mq", algorithm, *(["tiny"] if words.tiny else [])]
    c = rag_r1.get_config(",".join(base))
    name = "rsearch_best"
    c.name = "_".join([name, *variant.split(",")]) if variant else name
    reward = {"answer_em": {}}
    if not words.no_format:
        reward["format_ok"] = {"good": 0.0, "bad": -1.0}
    if words.grpo:
        reward["group_fewest_searches"] = {"weight": 0.3}
        c.rl.dynamic_sampling_rounds = 2
    c.rl.clip_high = 0.2 if words.no_clip_higher else 0.28
    stages = c.overrides.to_dict()
    if words.twice:
        c.stages = (*c.stages, "curate_more", "rl_more")
        # The policy answers here; for the first filter the teacher did.
        again = {n: x for n, x in stages["curate_rl"].items() if n not in TEACHER}
        stages["curate_more"] = again | {"curate": again["curate"] | {"first": ""}}
        stages["rl_more"] = stages["rl"] | {"data": {"train": "stage:curate_more"}}
    else:
        c.rl.steps = 2 * c.rl.steps
    with c.unlocked():
        c.reward, c.overrides = ConfigDict(reward), ConfigDict(stages)
    return c
