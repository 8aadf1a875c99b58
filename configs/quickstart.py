"""The quickstart: a small policy learns to search the embedded, made-up world.

    bash launch/quickstart.sh
    python -m rsearch.train --config=configs/quickstart.py --workdir=runs/quickstart

It needs no files. A decoder of 0.8 M parameters first imitates demonstrations, three in
four of which fail, and then learns by GRPO that it pays to search twice.
"""

from configs import base


def get_config():
    """Return the recipe's configuration."""
    c = base.get_config()
    c.name = "quickstart"
    c.stages = ("sft", "rl")
    c.model.update(
        num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_width=256
    )
    c.world.update(people=500, films=400, companies=100, cities=100, kinds=("bridge",))
    c.world.update(known_share=0.0, missing_share=0.0, distractors=0)
    # So small a model needs a short prompt; the protocol's own is for large models.
    c.protocol.name = "search_r1"
    c.protocol.instruction = "{question}"
    c.protocol.invalid_message = "Invalid. Try again."
    c.protocol.direct = "Answer: {question}"
    c.protocol.rag = "{passages} Answer: {question}"
    c.sft.update(steps=360, batch_size=64, lr=3e-3, warmup_steps=20)
    c.rl.update(steps=16, questions_per_step=32, lr=6e-4)
    c.rollout.update(group_size=8, temperature=1.0)
    return c
