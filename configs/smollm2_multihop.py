"""SmolLM2-135M learns multi-hop search: it imitates gold searches, then learns by RL.

    python -m rsearch.index --corpus=corpus.jsonl --kind=bm25 --out=index
    python -m rsearch.train --config=configs/smollm2_multihop.py \\
        --workdir=runs/multihop --config.retrieval.index=index \\
        --config.data.train=train.jsonl --config.data.dev=dev.jsonl

Words after the colon: `search` (the default) searches for each gold passage. Its
controls learn from the same questions in the same number of steps: `rag` searches once,
with the question, and `direct` answers without searching.

The sizes and the reward are those of configs/smollm2_hotpotqa.py, with room for the
four searches of 2WikiMultiHopQA's longest questions. The demonstrations come from gold
titles and relations, which the training questions must have, and from what the index
actually retrieves: there is no teacher. Learning rate and steps of the supervised stage
are typical for a model of this size, and not tuned.
"""

from ml_collections import ConfigDict

from configs import smollm2_hotpotqa, variants

CHOICES = {"searches": ("search", "rag", "direct")}
MAX_SEARCHES = {"search": 4, "rag": 1, "direct": 0}
DEMONSTRATED_SEARCHES = {"search": "gold", "rag": "question", "direct": "none"}


def get_config(variant=""):
    """Return the recipe's configuration; the module's docstring lists the variants."""
    word = variants.parse_variant(variant, choices=CHOICES).searches
    c = smollm2_hotpotqa.get_config()
    c.name = f"smollm2_multihop_{word}"
    c.stages = ("curate", "sft", "rl")
    c.rollout.update(
        max_searches=MAX_SEARCHES[word],
        max_turn_tokens=160,  # a thought repeats the question and a sentence
        max_observation_tokens=256,
    )
    # Half of the questions are enough to learn the format; RL sees all of them.
    c.curate.update(method="oracle", max_kept=640, searches=DEMONSTRATED_SEARCHES[word])
    # All variants learn from the questions that gold searches can answer.
    curate = {
        "data": {"max_train": 5000},
        "rollout": {"max_searches": MAX_SEARCHES["search"]},
    }
    c.overrides = ConfigDict({"curate": curate}).lock()
    c.sft.update(demonstrations="stage:curate", sequence_tokens=1536)
    return c
