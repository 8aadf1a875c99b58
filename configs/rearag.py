"""ReaRAG: chains of Thought, Action and Observation from a reasoning model, imitated.

    python -m rsearch.train --config=configs/rearag.py --dry_run
    python -m rsearch.train --config=configs/rearag.py:tiny --workdir=runs/rearag

Words after the colon: `no_reasoning` makes the chains from golden decompositions with
the policy's own model (Algorithm 3, the paper's ablation); `parity` does what the
public code does; `tiny` is the embedded world. Source: arXiv 2503.21729.

The models that write observations and word final answers are asked over an endpoint.
The paper's embedding model and reranker are not public; the retriever of its code and
a public cross-encoder are named in their place:

    python -m rsearch.index --corpus=wiki-18.jsonl --family=e5 \\
        --encoder=intfloat/e5-base-v2 --out=indexes/wiki18_100w_e5_base \\
        --max_passage_tokens=256 --max_query_tokens=256
"""

from ml_collections import ConfigDict

from configs import base, full_scale, tiny_world, variants

FLAGS = ("no_reasoning", "parity", "tiny")
BACKBONE = "zai-org/glm-4-9b-chat-hf"
TEACHER = "Qwen/QwQ-32B-Preview"
RERANKER = "cross-encoder/ms-marco-MiniLM-L-6-v2"
ENGINE = "GLM-4-32B"  # writes observations, and the final answer


def get_config(variant=""):
    """The recipe; the words of `variant` are above."""
    words = variants.chosen(variant, flags=FLAGS)
    c = base.get_config()
    c.name = "_".join(["rearag", *variant.split(",")]) if variant else "rearag"
    c.stages = ("curate", "sft")
    method(c, words)
    (tiny if words.tiny else at_full_scale)(c, words)
    if words.parity:
        parity(c, words)
    return c


def method(c, words):
    """What holds at any size: Algorithms 1 and 2."""
    c.protocol.name = "rearag"
    chains = {
        "method": "no_reasoning" if words.no_reasoning else "chains",
        "measure": "f1",  # chains with an F1 of 0 are discarded
        "observations": "gold",
        "max_steps": 25,
        "max_retries": 20,
    }
    with c.unlocked():
        c.overrides = ConfigDict({"curate": {"curate": chains}})
    c.sft.demonstrations = "stage:curate"
    c.eval.answer_from = "finish"
    c.retrieval.writing = "unless_comparison"
    c.rollout.max_searches = 14  # and a last step: fifteen


def at_full_scale(c, words):
    """The sizes of section 4.2 and, where it has none, those of the public code."""
    full_scale.backbone(c, BACKBONE)
    full_scale.wiki18_with_e5(c, top_k=3)
    c.retrieval.update(reranker=RERANKER, rerank_from=10)
    full_scale.eight_devices(c, tensor=2)
    full_scale.rare_saves(c, rl_steps=10)
    c.optim.update(b1=0.9, b2=0.95, weight_decay=0.1)
    # Training questions of MuSiQue, HotpotQA and NQ with their gold passages.
    c.data.train = "data/musique_hotpotqa_nq_train.jsonl"
    c.data.dev = full_scale.questions("hotpotqa", "dev")
    c.rollout.update(
        group_size=1,
        max_prompt_tokens=1024,
        max_turn_tokens=1024,
        max_observation_tokens=256,
        slots=32,
        extend_chunk=256,
    )
    # About 20,000 chains, two epochs; neither rate nor epochs are published.
    c.sft.update(batch_size=64, micro_batch=4, steps=2 * 20_000 // 64)
    c.sft.update(lr=1e-5, warmup_steps=30, decay=True, sequence_tokens=8192)
    asked = {"source": full_scale.ENDPOINT, "name": ENGINE}
    c.writer.update(temperature=0.95, top_p=0.7, max_reply_tokens=1024, **asked)
    c.writer.max_prompt_tokens = 4096
    c.answerer.update(temperature=0.8, top_p=0.7, max_reply_tokens=64, **asked)
    stages = c.overrides.to_dict()
    if not words.no_reasoning:
        stages["curate"] |= {
            "model": {"source": TEACHER},
            "mesh": {"fsdp": 1, "tensor": 8},
            "rollout": {
                "temperature": 0.99,
                "top_p": 0.85,
                "max_turn_tokens": 256,
                "max_prompt_tokens": 4096,  # rules, phrases and an example
                "max_searches": 24,
            },
        }
    with c.unlocked():
        c.overrides = ConfigDict(stages)


def parity(c, words):
    """What the public code does where the paper says otherwise, or nothing."""
    stages = c.overrides.to_dict()
    stages["curate"]["curate"]["observations"] = "engine"
    with c.unlocked():
        c.overrides = ConfigDict(stages)
    c.eval.answer_from = "log"
    c.retrieval.writing = "context_only"
    if not words.tiny:
        c.writer.top_p = 0.9
        c.retrieval.reranker = ""


def tiny(c, words):
    """The embedded world."""
    tiny_world.sizes(c)
    c.retrieval.writing = "context_only"  # the words its writer was taught in
    asked = {"source": "world:expert", "slots": 128, "max_reply_tokens": 32}
    c.writer.update(max_prompt_tokens=80, **asked)
    c.answerer.update(max_prompt_tokens=160, **asked)
    stages = c.overrides.to_dict()
    stages["curate"]["curate"] |= {"max_steps": 5, "max_retries": 4}
    stages["curate"]["data"] = {"max_train": 512}
    if not words.no_reasoning:
        stages["curate"]["model"] = {"source": "world:expert"}
        # Nucleus and temperature of a large model are noise to one this small.
        stages["curate"]["rollout"] = {"temperature": 0.3}
    with c.unlocked():
        c.overrides = ConfigDict(stages)
