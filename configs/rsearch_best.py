"""The best recipe found on the embedded world: RAG-R1, reinforced for longer.

    python -m rsearch.train --config=configs/rsearch_best.py --dry_run
    python -m rsearch.train --config=configs/rsearch_best.py:tiny --workdir=runs/best

From RAG-R1 come the parallel queries of a turn, the supervised stage on four kinds of
segments, and PPO on questions that were wrong but answerable, with a quarter of those
that were right. Here RL has twice the steps and DAPO's higher upper clip (arXiv
2503.14476), and a rollout with a malformed turn or a forged passage is penalised by as
much as a right answer earns. docs/results.md has the other variants that were tried.

Words after the colon: `twice` filters the questions again after half of the steps, by
what the policy then gets wrong; `grpo` compares the rollouts of a question, rewards
right ones with the fewest searches (R1-Searcher++) and samples dynamically (DAPO);
`no_format` leaves out the penalty and `no_clip_higher` the higher clip; `sq` asks one
query per turn; `tiny` runs on the embedded world.
"""

from ml_collections import ConfigDict

from configs import rag_r1, variants

TEACHER = ("model", "mesh")  # sections that a data stage sets for a teacher
FLAGS = ("twice", "grpo", "no_format", "no_clip_higher", "sq", "tiny")


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    words = variants.parse_variant(variant, flags=FLAGS)
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
        # Here the policy itself answers; for the first filter it was the teacher.
        curate_settings = {
            n: x for n, x in stages["curate_rl"].items() if n not in TEACHER
        }
        stages["curate_more"] = curate_settings | {
            "curate": curate_settings["curate"] | {"first": ""}
        }
        stages["rl_more"] = stages["rl"] | {"data": {"train": "stage:curate_more"}}
    else:
        c.rl.steps = 2 * c.rl.steps
    c.reward, c.overrides = ConfigDict(reward).lock(), ConfigDict(stages).lock()
    return c
