"""transformers' `generate` as a peer of the rollout benchmarks, on torch."""

import time

import numpy as np

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


def _generate(torch, network, tokens, num_new, stamps):
    """[B, P + N] ids; the time after each token goes to `stamps`."""
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
            attention_mask=torch.ones_like(tokens),
            generation_config=greedy,
            stopping_criteria=transformers.StoppingCriteriaList([Stamp()]),
        )


def _prompts(torch, network, batch, num_prompt):
    """The ids that this package's own subject reads, too."""
    rng = np.random.default_rng(0)
    highest = min(network.config.vocab_size, 256)
    ids = rng.integers(3, highest, (batch, num_prompt))
    return torch.tensor(ids, device=network.device)


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
    *, model, batch, num_prompt, num_new, num_observed, num_turns, dtype="float32"
):
    """`generate` turn by turn on the growing text, as public search agents call it."""
    torch, network = load(model, dtype)
    prompts = _prompts(torch, network, batch, num_prompt)
    observed = _prompts(torch, network, batch, num_observed)

    def once():
        started = time.perf_counter()
        text, num_read = prompts, 0
        for turn in range(num_turns):
            if turn:
                text = torch.cat([text, observed], dim=1)
            num_read += text.numel()
            text = _generate(torch, network, text, num_new, [])
        return {
            "seconds": time.perf_counter() - started,
            "written": batch * num_turns * num_new,
            "tokens read": num_read,
        }

    return once
