"""transformers' `generate` as a peer of the rollout benchmarks, on torch."""

import time

from rsearch.bench.workload import prompt_tokens, turn_lengths

TORCH_DTYPES = ("float32", "bfloat16")


def load(model: str, dtype: str):
    """(torch, the model on the best device there is)."""
    import torch
    import transformers

    assert dtype in TORCH_DTYPES, dtype
    transformers.logging.set_verbosity_error()
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch, network.eval().to(device)


def _generate(torch, network, tokens, num_new, stamps, mask=None):
    """[B, P + N] ids; the time after each token goes to `stamps`, a list."""
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
    """The ids that this package's own subject reads, too."""
    ids = prompt_tokens(batch, num_prompt, network.config.vocab_size)
    return torch.tensor(ids, device=network.device).long()


def make_decode(*, model, batch, num_prompt, num_new, dtype="float32"):
    """Greedy decoding; what comes before the first token counts as prefill."""
    torch, network = load(model, dtype)
    prompts = _prompts(torch, network, batch, num_prompt)

    def once():
        stamps = [time.perf_counter()]
        # The first token comes with the prefill: one more makes N passes of decoding.
        ids = _generate(torch, network, prompts, num_new + 1, stamps)
        return {
            "seconds": stamps[-1] - stamps[1],
            "prefill_seconds": stamps[1] - stamps[0],
            "tokens": ids[:, num_prompt : num_prompt + num_new].tolist(),
        }

    return once


def make_turns(
    *,
    model,
    batch,
    num_prompt,
    num_new,
    num_observed,
    num_turns,
    num_rollouts,
    group_size,
    spread,
    dtype="float32",
):
    """`generate` turn by turn on the growing text, as public search agents call it.

    A batch of rollouts goes through all its turns before the next one begins. Texts are
    filled up on the left; a turn lasts until the batch's longest has ended. Arguments
    are those of `rsearch.bench.sampling.make_turns`.
    """
    torch, network = load(model, dtype)
    lengths = turn_lengths(num_rollouts, num_turns, num_new, spread)
    prompts = _prompts(torch, network, num_rollouts // group_size, num_prompt)
    prompts = prompts.repeat_interleave(group_size, dim=0)
    (observed,) = _prompts(torch, network, 1, num_observed)

    def filled(texts):
        longest = max(map(len, texts))
        tokens = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, longest - len(text) :] = text
            mask[row, longest - len(text) :] = 1
        return tokens.to(network.device), mask.to(network.device)

    def once():
        started, num_read = time.perf_counter(), 0
        for first in range(0, num_rollouts, batch):
            texts = list(prompts[first : first + batch])
            for turn in range(num_turns):
                if turn:
                    texts = [torch.cat([text, observed]) for text in texts]
                own = lengths[first : first + batch, turn].tolist()
                tokens, mask = filled(texts)
                num_read += tokens.numel()
                ids = _generate(torch, network, tokens, max(own), [], mask)
                new = ids[:, tokens.shape[1] :]
                texts = [torch.cat([t, x[:n]]) for t, x, n in zip(texts, new, own)]
        return {
            "seconds": time.perf_counter() - started,
            "written": int(lengths.sum()),
            "tokens read": num_read,
        }

    return once
