"""Measure the peers that rollouts, updates and searches are compared with.

They are transformers' `generate`, an update in torch, a retrieval server as in public
systems, and google-tunix's GRPO. Each function imports its own libraries, so the
interpreter that runs one peer needs neither those of the others nor this package's.

    python -m rsearch.bench.peers SETTINGS

runs the retrieval server: POST /retrieve {"queries", "topk", "return_scores"} ->
{"result": [[{"document": {"id", "contents"}, "score"}]]}. For each request it encodes
the query with transformers, on the GPU if there is one, and multiplies it with all
vectors, as a flat index does. Its HTTP layer is this package's, which is cheaper than
those of public systems. It exits when its stdin ends.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rsearch.bench.child import Repetition
from rsearch.bench.workload import (
    MAX_GRAD_NORM,
    REWARD_DIVISOR,
    multiply_in_full,
    prompt_rows,
    prompt_tokens,
    token_rows,
    turn_lengths,
)


def load_peer(model: str, dtype: str) -> tuple[types.ModuleType, Any]:
    """Return (torch, the model on the GPU, or on the CPU if there is none)."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch, network.eval().to(device)


def _generate(torch, network, tokens, num_new, stamps, mask=None):
    """Return [B, P + N] ids, and append the time after each token to `stamps`."""
    import transformers

    class Stamp(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            if ids.is_cuda:
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    greedy = transformers.GenerationConfig(
        max_new_tokens=num_new,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    network.generation_config.eos_token_id = None
    with torch.inference_mode():
        return network.generate(
            tokens,
            attention_mask=torch.ones_like(tokens) if mask is None else mask,
            generation_config=greedy,
            stopping_criteria=transformers.StoppingCriteriaList([Stamp()]),
        )


def _prompts(torch, network, batch, num_prompt):
    """Return the same prompt ids that this package is measured with."""
    ids = prompt_tokens(batch, num_prompt, network.config.vocab_size)
    return torch.tensor(ids, device=network.device).long()


def make_decode(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding; the time until the first token is the prefill."""
    torch, network = load_peer(model, dtype)
    prompts = _prompts(torch, network, batch, num_prompt)

    def repeat():
        stamps = [time.perf_counter()]
        # The prefill yields the first token, so one more token makes N decode steps.
        ids = _generate(torch, network, prompts, num_new + 1, stamps)
        return {
            "seconds": stamps[-1] - stamps[1],
            "prefill_seconds": stamps[1] - stamps[0],
            "tokens": ids[:, num_prompt : num_prompt + num_new].tolist(),
        }

    return repeat


def make_turns(
    *,
    model: str,
    batch: int,
    num_prompt: int,
    num_new: int,
    num_observed: int,
    num_turns: int,
    num_rollouts: int,
    group_size: int,
    spread: float,
    dtype: str = "float32",
) -> Repetition:
    """Prepare `generate` turn by turn on a growing text, as public agents call it.

    A batch of rollouts finishes all its turns before the next batch begins. Texts are
    padded on the left, and a turn lasts as long as the longest one in the batch. The
    arguments are those of `rsearch.bench.rollout.make_turns`.
    """
    torch, network = load_peer(model, dtype)
    lengths = turn_lengths(num_rollouts, num_turns, num_new, spread)
    prompts = _prompts(torch, network, num_rollouts // group_size, num_prompt)
    prompts = prompts.repeat_interleave(group_size, dim=0)
    (observed,) = _prompts(torch, network, 1, num_observed)

    def pad_left(texts):
        longest = max(map(len, texts))
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, longest - len(text) :] = text
            mask[row, longest - len(text) :] = 1
        return tokens.to(network.device), mask.to(network.device)

    def repeat():
        start_time, num_read = time.perf_counter(), 0
        for first in range(0, num_rollouts, batch):
            texts = list(prompts[first : first + batch])
            for turn in range(num_turns):
                if turn:
                    texts = [torch.cat([text, observed]) for text in texts]
                sizes = lengths[first : first + batch, turn].tolist()
                tokens, mask = pad_left(texts)
                num_read += tokens.numel()
                ids = _generate(torch, network, tokens, max(sizes), [], mask)
                new_ids = ids[:, tokens.shape[1] :]
                texts = [
                    torch.cat([t, x[:n]]) for t, x, n in zip(texts, new_ids, sizes)
                ]
        return {
            "seconds": time.perf_counter() - start_time,
            "written": int(lengths.sum()),
            "tokens read": num_read,
        }

    return repeat


ADAMW = dict(lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def make_update(
    *,
    model: str,
    num_rows: int,
    num_tokens: int,
    num_learnt: int,
    micro_batch: int,
    dtype: str,
) -> Repetition:
    """Prepare an update on the likelihood of B rows of T tokens by torch and AdamW.

    Only the last tokens of a row are trained on and have logits. A token's
    log-probability is its logit minus a logsumexp, as in TRL's `selective_log_softmax`.
    The optimizer is torch's fused one.
    """
    torch, network = load_peer(model, "float32")
    network.train()
    network.config.use_cache = False
    # Norms have no weight decay, as in this package.
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    ids = token_rows(num_rows, num_tokens, network.config.vocab_size)
    tokens = torch.tensor(ids, device=network.device).long()
    cast = contextlib.nullcontext
    if dtype != "float32":
        cast = functools.partial(
            torch.autocast, tokens.device.type, getattr(torch, dtype)
        )

    def mean_loss(rows):
        logits = network(rows, logits_to_keep=num_learnt + 1).logits[:, :-1]
        target_logits = logits.gather(-1, rows[:, -num_learnt:, None])[..., 0]
        parts = [torch.logsumexp(row, dim=-1) for row in logits]
        return (torch.stack(parts) - target_logits).sum() / (num_rows * num_learnt)

    def repeat():
        start_time = time.perf_counter()
        total = 0.0
        for rows in tokens.split(micro_batch):
            with cast():
                loss = mean_loss(rows)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start_time
        return {"seconds": seconds, "loss": total, "grad_norm": norm.item()}

    return repeat


PATH = "/retrieve"
MAX_TOKENS = 256  # most tokens of a query, as published
PREFIXES = {
    "minilm": "",
    "e5": "query: ",
    "bge": "Represent this sentence for searching relevant passages: ",
}


def serve(settings: str) -> None:
    """Serve until stdin ends."""
    from rsearch.runtime.server import JsonServer

    arguments = json.loads(settings)
    if arguments["family"] not in PREFIXES:
        reason = f"it serves {', '.join(PREFIXES)}, not {arguments['family']}"
        print(json.dumps({"missing": reason}), flush=True)
        return
    try:
        search = make_exact_search(**arguments)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": f"{error.name} is not installed"}), flush=True)
        return

    def answer(body):
        return {"result": [search(q, body["topk"]) for q in body["queries"]]}

    server = JsonServer("127.0.0.1", 0, {("POST", PATH): answer}, max_waiting=1024)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}{PATH}"}), flush=True)
    sys.stdin.read()
    os._exit(0)


def make_exact_search(folder: str, encoder: str, family: str) -> Callable:
    """Return a function (query, k) -> hits."""
    import torch
    import transformers

    folder = pathlib.Path(folder)
    passages = json.loads((folder / "texts.json").read_text())["passages"]
    vectors = np.load(folder / "vectors.npy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModel.from_pretrained(encoder).eval().to(device)

    def search(query, top_k):
        rows = tokenizer(
            [PREFIXES[family] + query],
            max_length=MAX_TOKENS,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(device)
        with torch.no_grad():
            states = model(**rows).last_hidden_state
        if family == "bge":
            embeddings = states[:, 0]
        else:
            mask = rows["attention_mask"][..., None]
            embeddings = (states * mask).sum(1) / mask.sum(1)
        embeddings = torch.nn.functional.normalize(embeddings, dim=-1).cpu().numpy()
        scores = vectors @ embeddings[0]
        top_indices = np.argpartition(-scores, top_k - 1)[:top_k]
        return [
            {
                "document": {"id": passages[i][0], "contents": passages[i][1]},
                "score": float(scores[i]),
            }
            for i in top_indices[np.argsort(-scores[top_indices])]
        ]

    return search


class Numbers:
    """A tokenizer whose words are the ids, written as numbers."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the ids of a text of numbers."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int], **_: object) -> str:
        """Return the text of these ids."""
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        """Return the id that begins a text."""
        return 1

    def eos_id(self) -> int:
        """Return the id that ends a text."""
        return 2

    def pad_id(self) -> int:
        """Return the id of padding."""
        return 0


def reward(
    prompts: Sequence[str], completions: Sequence[str], **_: object
) -> list[float]:
    """Return a reward for each completion, which depends only on its length."""
    return [len(text) % REWARD_DIVISOR / REWARD_DIVISOR for text in completions]


def _model(spec):
    """Return a Llama of this shape, in float32."""
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


def make_step(
    *,
    spec: dict,
    num_questions: int,
    group_size: int,
    num_prompt: int,
    num_new: int,
    micro_batch: int,
) -> Repetition:
    """Prepare steps of tunix's GRPOLearner: rollouts, reference scores, an update."""
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
                # tunix pads prompts to a power of two, at least 32.
                kv_cache_size=max(32, 2 * num_prompt) + num_new + 1,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    settings = GRPOConfig(num_generations=group_size, beta=0.04)
    learner = GRPOLearner(cluster, settings, reward_fns=reward)
    return _step_by_step(learner, num_questions, num_prompt, spec["vocab_size"])


def _step_by_step(learner, num_questions, num_prompt, vocab_size):
    """Return a function that makes a learner on another thread run one more step."""
    words = Numbers()
    start_signal, end_signal = threading.Semaphore(0), threading.Semaphore(0)
    errors = []

    def questions():
        step = 0
        while True:
            start_signal.acquire()
            rows = prompt_rows(num_questions, num_prompt, vocab_size, step)
            yield {"prompts": np.array([words.decode(row) for row in rows])}
            end_signal.release()
            step += 1

    def train():
        try:
            learner.train(questions())
        except BaseException as error:
            errors.append(error)
            end_signal.release()

    threading.Thread(target=train, daemon=True).start()

    def repeat():
        start_time = time.perf_counter()
        start_signal.release()
        end_signal.acquire()
        if errors:
            raise errors[0]
        return {"seconds": time.perf_counter() - start_time}

    return repeat


if __name__ == "__main__":
    serve(*sys.argv[1:])
