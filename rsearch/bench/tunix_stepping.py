"""google-tunix's GRPO as a peer of whole steps; runs with an interpreter of its own."""

import threading
import time

import numpy as np

from rsearch.bench.precision import multiply_in_full
from rsearch.bench.reinforcing import REWARD_DIVISOR, prompt_rows


class Numbers:
    """A tokenizer whose words are the ids themselves."""

    def encode(self, text, **_):
        """Ids of a text of numbers."""
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        """A text of these ids."""
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self):
        """Of the beginning of a text."""
        return 1

    def eos_id(self):
        """Of its end."""
        return 2

    def pad_id(self):
        """Of what fills a row."""
        return 0


def reward(prompts, completions, **_):
    """One float for each completion, from its length alone."""
    return [len(text) % REWARD_DIVISOR / REWARD_DIVISOR for text in completions]


def _model(spec):
    """A Llama of this shape, in float32."""
    from flax import nnx
    from tunix.models.llama3 import model as llama

    config = llama.ModelConfig(
        num_layers=spec["num_layers"],
        vocab_size=spec["vocab_size"],
        embed_dim=spec["width"],
        hidden_dim=spec["mlp_width"],
        num_heads=spec["num_heads"],
        head_dim=spec["head_dim"],
        num_kv_heads=spec["num_kv_heads"],
        rope_theta=int(spec["rope_theta"]),
        norm_eps=spec["norm_eps"],
        weight_tying=spec["tie_embeddings"],
    )
    return llama.Llama3(config, rngs=nnx.Rngs(0))


def make_step(*, spec, num_questions, group_size, num_prompt, num_new, micro_batch):
    """Whole steps of its GRPOLearner: rollouts, reference's scores, an update."""
    multiply_in_full()
    import jax
    import optax
    from tunix.rl import rl_cluster as clusters
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    cluster = clusters.RLCluster(
        actor=_model(spec),
        reference=_model(spec),
        tokenizer=Numbers(),
        cluster_config=clusters.ClusterConfig(
            role_to_mesh={role: mesh for role in roles},
            training_config=clusters.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-5),
                eval_every_n_steps=10**9,
                max_steps=10**6,
                mini_batch_size=num_questions,
                train_micro_batch_size=micro_batch,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=num_new,
                max_prompt_length=num_prompt,
                # It fills prompts up to a power of two, of 32 at least.
                kv_cache_size=max(32, 2 * num_prompt) + num_new + 1,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    settings = GRPOConfig(num_generations=group_size, beta=0.04)
    learner = GRPOLearner(cluster, settings, reward_fns=reward)
    return _stepper(learner, num_questions, num_prompt, spec["vocab_size"])


def _stepper(learner, num_questions, num_prompt, vocab_size):
    """`once` of a learner that trains on a thread and waits for its next questions."""
    words = Numbers()
    goes_on, is_done, failed = threading.Semaphore(0), threading.Semaphore(0), []

    def questions():
        step = 0
        while True:
            goes_on.acquire()
            rows = prompt_rows(num_questions, num_prompt, vocab_size, step)
            yield {"prompts": np.array([words.decode(row) for row in rows])}
            is_done.release()
            step += 1

    def train():
        try:
            learner.train(questions())
        except BaseException as error:
            failed.append(error)
            is_done.release()

    threading.Thread(target=train, daemon=True).start()

    def once():
        started = time.perf_counter()
        goes_on.release()
        is_done.acquire()
        if failed:
            raise failed[0]
        return {"seconds": time.perf_counter() - started}

    return once
