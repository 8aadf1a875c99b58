"""This package as a subject of the benchmark of whole GRPO steps."""

import functools
import time

import jax
import numpy as np

from rsearch.bench.precision import multiply_in_full
from rsearch.bench.reinforcing import REWARD_DIVISOR, prompt_rows
from rsearch.bench.sampling import turns_protocol
from rsearch.bench.shapes import TEXT
from rsearch.bench.updating import ADAMW, MAX_GRAD_NORM
from rsearch.learn import objectives
from rsearch.learn.advantages import with_advantages
from rsearch.learn.batch import cut, pack
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.packing import packed
from rsearch.learn.train_state import create_state
from rsearch.learn.update import make_policy_scorer, make_policy_update, put
from rsearch.models.decoder import Decoder, init_params
from rsearch.models.sharding import make_mesh
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.spec import DecoderSpec
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.decode import Sampler
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.types import Question

KL_COEF = 0.04  # google-tunix's


def _roll_out(network, mesh, *, num_rows, group_size, num_prompt, num_new):
    """A rollout engine whose conversations are one turn of N tokens."""
    tokenizer = train_tokenizer(TEXT * 2)
    limits = Limits(
        max_searches=0,
        max_prompt_tokens=num_prompt,
        max_turn_tokens=num_new,
        max_observation_tokens=1,
    )
    host = Host(tokenizer, turns_protocol(), lambda queries: [], limits)
    sampler = Sampler(
        network,
        mesh,
        stop_table=token_automaton((), tokenizer.token_bytes),
        eos_ids=(),
        num_slots=num_prompt + num_new,
        max_turn_tokens=num_new,
        chunk=num_prompt,
        temperature=1.0,
        top_p=1.0,
    )
    return RolloutEngine(sampler, host, num_rows=num_rows, group_size=group_size)


def make_step(*, spec, num_questions, group_size, num_prompt, num_new, micro_batch):
    """Whole steps of GRPO: rollouts, the reference's scores, an update."""
    multiply_in_full()
    network, mesh = Decoder(DecoderSpec(**spec)), make_mesh(devices=jax.devices()[:1])
    params = jax.jit(functools.partial(init_params, network))(jax.random.key(0))
    roll_out = _roll_out(
        network,
        mesh,
        num_rows=num_questions * group_size,
        group_size=group_size,
        num_prompt=num_prompt,
        num_new=num_new,
    )
    optimizer = make_optimizer(
        **ADAMW, max_grad_norm=MAX_GRAD_NORM, warmup_steps=0, decay_steps=0
    )
    loss = objectives.policy_loss(
        clip_low=0.2, clip_high=0.2, kl_coef=KL_COEF, kl_kind="k3", entropy_coef=0.0
    )
    score = make_policy_scorer(network, mesh)
    update = make_policy_update(network, optimizer, mesh, loss=loss, loss_mean="token")
    state, step = create_state(params, optimizer, mesh), 0

    def once():
        nonlocal state, step
        rows = prompt_rows(num_questions, num_prompt, network.spec.vocab_size, step)
        roll_out.prompt = lambda question: rows[int(question.id)]
        questions = [Question(str(i), "", ("",)) for i in range(num_questions)]
        started = time.perf_counter()
        key = jax.random.key(step)
        groups = roll_out(roll_out.place_params(state.params), questions, key)
        rolled = time.perf_counter()
        lengths = [[len(r.segments[-1].text) for r in g.rollouts] for g in groups]
        rewards = np.array(lengths) % REWARD_DIVISOR / REWARD_DIVISOR
        batch = pack(groups, rewards, num_prompt + num_new)
        batch = put(packed(cut(batch, micro_batch)), mesh)
        batch = batch._replace(reference_logp=score(params, None, batch))
        batch = with_advantages(
            batch, algorithm="grpo", group_size=group_size, normalize_std=True
        )
        state, _ = update(state, None, batch)
        jax.block_until_ready(state)
        ended, step = time.perf_counter(), step + 1
        return {"seconds": ended - started, "rollout seconds": rolled - started}

    return once
