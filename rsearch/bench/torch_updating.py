"""The same update in torch, as trainers such as TRL's write it."""

import contextlib
import functools
import time

import numpy as np

from rsearch.bench.torch_sampling import load

ADAMW = dict(lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
MAX_GRAD_NORM = 1.0


def make_update(*, model, num_rows, num_tokens, micro_batch, dtype, **_):
    """Forward, backward and AdamW on B rows of T tokens: the likelihood of them all.

    The log-probability of a token is its logit less a logsumexp, as TRL's
    `selective_log_softmax` has it; the optimizer is torch's fused one.
    """
    torch, network = load(model, "float32")
    network.train()
    network.config.use_cache = False
    # Norms do not decay, as elsewhere.
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, network.config.vocab_size, (num_rows, num_tokens))
    tokens = torch.tensor(ids.astype(np.int32), device=network.device).long()
    cast = contextlib.nullcontext
    if dtype != "float32":
        cast = functools.partial(
            torch.autocast, tokens.device.type, getattr(torch, dtype)
        )

    def summed(rows):
        logits = network(rows).logits[:, :-1]
        chosen = logits.gather(-1, rows[:, 1:, None])[..., 0]
        parts = [torch.logsumexp(row, dim=-1) for row in logits]
        return (torch.stack(parts) - chosen).sum() / (num_rows * (num_tokens - 1))

    def once():
        started = time.perf_counter()
        total = 0.0
        for rows in tokens.split(micro_batch):
            with cast():
                loss = summed(rows)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "loss": total, "grad_norm": norm.item()}

    return once
