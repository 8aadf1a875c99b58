"""SmolLM2-135M learns to search Wikipedia for HotpotQA: end to end on real data.

    python -m rsearch.index --corpus=corpus.jsonl --out=index --family=minilm \\
        --encoder=sentence-transformers/all-MiniLM-L6-v2
    python -m rsearch.train --config=configs/smollm2_hotpotqa.py \\
        --workdir=runs/smollm2 --config.retrieval.index=index \\
        --config.data.train=train.jsonl --config.data.dev=dev.jsonl

The sizes are for one machine without an accelerator: 16 rollouts per step, contexts of
about a thousand tokens, float32. So small a model rarely gives an exact answer, so the
reward is F1 and a small bonus for the right format, instead of Search-R1's exact match.
Nor does the model use the format by itself: before RL it needs a supervised stage on
your own demonstrations:

    --config.stages=sft,rl --config.sft.demonstrations=demonstrations.jsonl
"""

from ml_collections import ConfigDict

from configs import base


def get_config():
    """Return the recipe's configuration."""
    c = base.get_config()
    c.name = "smollm2_hotpotqa"
    c.stages = ("rl",)
    c.model.source = "HuggingFaceTB/SmolLM2-135M-Instruct"
    # A quarter of a row's tokens are learnt; larger chunks would contain more padding.
    c.model.logit_chunk = 256  # x 49,152 ids x 4 bytes = 50 MB
    c.tokenizer.source = ""
    c.protocol.name = "search_r1"
    c.data.train = "RUC-NLPIR/FlashRAG_datasets:hotpotqa@train"
    c.data.dev = "RUC-NLPIR/FlashRAG_datasets:hotpotqa@dev"
    c.retrieval.update(
        corpus="",
        encoder="sentence-transformers/all-MiniLM-L6-v2",
        family="minilm",
        top_k=3,
    )
    c.rollout.update(
        group_size=4,
        max_concurrent=16,
        max_searches=2,
        max_prompt_tokens=256,
        max_turn_tokens=96,
        max_observation_tokens=224,
        extend_chunk=64,
    )
    c.reward = ConfigDict(
        {"answer_f1": {}, "format_ok": {"good": 0.2, "bad": 0.0}}
    ).lock()
    # The stage that a user adds; a row has room for the longest rollout.
    c.sft.update(
        steps=120,
        batch_size=16,
        micro_batch=16,  # packed into shared rows
        sequence_tokens=1024,
        lr=1e-4,
        warmup_steps=10,
    )
    c.rl.update(
        steps=200,
        questions_per_step=4,
        micro_batch=16,  # packed into shared rows
        lr=1e-6,
        warmup_steps=10,
        kl_coef=0.001,
        kl_kind="k3",
    )
    # A step takes minutes on two cores, and a signal is handled only after it.
    c.checkpoint.update(sft_steps=20, rl_steps=10, grace_seconds=600.0)
    c.optim.b2 = 0.999
    c.eval.update(at_start=False, methods=("protocol",), max_questions=20)
    return c
