"""Settings of recipes on the embedded world: a small pretrained model, run on CPU."""


def set_tiny_world(c):
    """Set the embedded world, a small model pretrained on its text, and short prompts.

    So small a model needs a short prompt: the protocol's name, which is all that tells
    it what to do, and the question. Set c.protocol.name before calling this.
    """
    c.model.source = "world:base"
    c.tokenizer.source = ""
    c.protocol.instruction = f"{c.protocol.name}: {{question}}"
    c.protocol.system = None
    if c.protocol.name in ("search_r1", "r_search", "rag_r1_sq", "rag_r1_mq"):
        c.protocol.invalid_message = "Invalid. Try again."
    c.protocol.rewrite = "{document} Recall: {question}"
    c.protocol.direct = "Answer: {question}"
    c.protocol.rag = "{passages} Answer: {question}"
    # Room for the longest solutions of the world's questions: in one turn, the answer
    # and the evidence of four hops or four recalled facts.
    longest = 64 if c.protocol.name == "r_search" else 40
    c.rollout.update(
        max_concurrent=64,
        max_searches=4,
        max_prompt_tokens=24,
        max_turn_tokens=longest,
        max_observation_tokens=24,
    )
    c.sft.update(sequence_tokens=320, steps=60, lr=1e-3, warmup_steps=5)
    c.rl.update(kl_coef=0.0, lr=6e-4, steps=12)
    c.critic.update(lr=2e-3)
    c.eval.update(at_start=True, methods=("protocol", "direct", "rag"))


def ppo(c):
    """Set PPO's batches, with one rollout per question."""
    c.rollout.group_size = 1
    c.rl.update(questions_per_step=192, micro_batch=96, gamma=1.0, gae_lambda=1.0)
