"""Tokens and bytes of a stage, compared with arithmetic by hand."""

import dataclasses
import json
import math

import pytest

from configs import base
from rsearch.config.recipes import apply_overrides
from rsearch.learn.batch import pack_segments, to_micro_batches
from rsearch.learn.packing import pack_micro_batches
from rsearch.models.hf.families import PUBLISHED, make_config
from rsearch.models.spec import DecoderSpec
from rsearch.plan import costs
from rsearch.setup.checks import check_layout

SPEC = DecoderSpec(
    vocab_size=100,
    width=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    mlp_width=16,
    max_context=200,
)
# Attention 8x4x2 + 2 x 8x2x2 + 4x2x8 = 192, MLP 3 x 8x16 = 384 and two norms 16 make
# 592 per layer; plus two embeddings of 100x8, and 8 of the last norm.
PARAMS = 2 * 592 + 2 * 800 + 8


def config(**overrides):
    return apply_overrides(
        base.get_config(),
        {
            "rollout.max_prompt_tokens": 10,
            "rollout.max_turn_tokens": 5,
            "rollout.max_observation_tokens": 7,
            "rollout.max_searches": 3,
            "rollout.max_concurrent": 8,
            "rl.micro_batch": 4,
            "rl.questions_per_step": 8,
            **overrides,
        },
    )


def memory_of(c, stage, spec, num_devices, *, host_devices=8):
    return costs.memory_of(c, stage, spec, num_devices, host_devices=host_devices)


def test_the_parameters_are_counted():
    assert SPEC.num_params == PARAMS


def test_a_rollout_is_prompt_turns_and_observations():
    text, tokens = costs.context_of(config(), "rl")
    assert tokens == 10 + 4 * 5 + 3 * 7
    assert text == "prompt 10 + 4 turns x 5 + 3 observations x 7"


def test_without_a_last_turn_the_last_search_is_never_read():
    c = config(**{"rollout.forced_final_turn": False})
    assert costs.context_of(c, "rl")[1] == 10 + 3 * 5 + 2 * 7


def test_three_queries_are_shown_with_a_budget_each_and_repeated():
    c = config(**{"protocol.name": "rag_r1_mq"})
    assert costs.context_of(c, "rl")[1] == 10 + 4 * 5 + 3 * (3 * 7 + 5)
    c = config(**{"protocol.name": "rag_r1_mq", "protocol.max_queries": 2})
    assert costs.context_of(c, "rl")[1] == 10 + 4 * 5 + 3 * (2 * 7 + 5)


def test_retried_questions_may_search_more_often():
    c = config(**{"curate.method": "answerable", "curate.retry_searches": 6})
    assert costs.context_of(c, "curate")[1] == 10 + 7 * 5 + 6 * 7
    c = config(**{"curate.method": "segments", "curate.retry_searches": 6})
    assert costs.context_of(c, "curate")[1] == 10 + 4 * 5 + 3 * 7


@pytest.mark.fault(4, "context", "arithmetic shown")
def test_a_context_that_is_too_small_is_refused_with_the_sum():
    c = config(**{"rollout.context_tokens": 26})
    with pytest.raises(ValueError) as caught:
        costs.context_of(c, "rl")
    for term in ("context_tokens = 26", "10", "2 turns x 5", "1 obs", "= 27 tokens"):
        assert term in str(caught.value)


@pytest.mark.parametrize("num_tokens", [27, 50, 99])
def test_a_context_set_in_the_configuration_counts(num_tokens):
    c = config(**{"rollout.context_tokens": num_tokens})
    assert costs.context_of(c, "rl")[1] == num_tokens
    assert costs.context_of(config(**{"sft.sequence_tokens": 33}), "sft")[1] == 33


def test_a_stage_keeps_weights_two_moments_and_its_initial_weights():
    memory = memory_of(config(), "rl", SPEC, 1)
    assert memory.resident == {
        "weights": 4 * PARAMS,
        "Adam moments": 8 * PARAMS,
        "weights it began with": 4 * PARAMS,
    }
    assert memory.updating["gradients"] == 8 * PARAMS


def test_a_value_model_is_as_large_as_the_policy_without_its_logits():
    memory = memory_of(config(**{"rl.algorithm": "ppo"}), "rl", SPEC, 1)
    assert memory.resident["critic"] == 4 * (PARAMS - 800)
    assert memory.resident["critic's moments"] == 8 * (PARAMS - 800)
    tied = dataclasses.replace(SPEC, tie_embeddings=True)
    memory = memory_of(config(**{"rl.algorithm": "ppo"}), "rl", tied, 1)
    assert memory.resident["critic"] == memory.resident["weights"]


def test_moments_in_bfloat16_take_half():
    c = config(**{"optim.moments_dtype": "bfloat16", "rl.algorithm": "ppo"})
    memory = memory_of(c, "rl", SPEC, 1)
    assert memory.resident["Adam moments"] == 4 * PARAMS
    assert memory.resident["critic's moments"] == 4 * (PARAMS - 800)


def test_offloaded_arrays_are_on_the_device_only_during_the_step():
    c = config(**{"model.offload": ("optimizer", "reference")})
    memory = memory_of(c, "rl", SPEC, 1)
    assert memory.resident == {"weights": 4 * PARAMS}
    away = {"Adam moments": 8 * PARAMS, "weights it began with": 4 * PARAMS}
    assert memory.host == away
    assert memory.stepping == {"gradients": 4 * PARAMS, "Adam moments": 8 * PARAMS}
    assert memory_of(config(), "rl", SPEC, 1).stepping == {}
    larger = costs.Memory(
        {"a": 1.0}, {"b": 5.0}, {"d": 4.0}, {"e": 7.0}, host={"f": 99.0}
    )
    assert larger.peak == 8.0
    assert dataclasses.replace(larger, evaluating={"a": 1.0, "g": 6.0}).peak == 8.0
    assert dataclasses.replace(larger, evaluating={"a": 1.0, "g": 8.0}).peak == 9.0


@pytest.mark.parametrize("rank", [0, 3])
def test_the_evaluation_after_sft_holds_no_moments(rank):
    c = config(**{"model.lora_rank": rank, "eval.methods": ("protocol",)})
    memory = memory_of(c, "sft", SPEC, 1)
    assert memory.rolling == {} and "Adam moments" in memory.resident
    rolling = memory_of(c, "rl", SPEC, 1).rolling
    assert memory.evaluating == {"weights": 4 * PARAMS} | rolling
    for none in ({"eval.methods": ()}, {"trains": "rewriter"}):
        assert memory_of(config(**none), "sft", SPEC, 1).evaluating == {}
    assert memory_of(c, "rl", SPEC, 1).evaluating == {}


def test_with_lora_only_adapters_are_trained_and_the_weights_are_kept_once():
    low = {"model.lora_rank": 3, "model.lora_matrices": ("q", "down")}
    c = config(**low | {"rl.algorithm": "ppo"})
    memory = memory_of(c, "rl", SPEC, 1)
    adapters = 2 * 3 * ((8 + 8) + (16 + 8))  # layers, rank, widths around q and down
    assert memory.resident == {
        "weights": 4 * PARAMS,
        "adapters": 4 * adapters,
        "Adam moments": 8 * adapters,
        "critic": 4 * adapters,
        "critic's moments": 8 * adapters,
    }
    assert memory.updating["gradients"] == 8 * adapters
    assert memory.rolling["copy that decodes"] == 4 * PARAMS  # merged
    half = memory_of(config(**low | {"model.dtype": "bfloat16"}), "rl", SPEC, 1)
    assert half.rolling["copy that decodes"] == 2 * PARAMS


def test_keys_and_values_are_two_for_each_layer_head_and_token():
    memory = memory_of(config(), "rl", SPEC, 1)
    per_token = 2 * 2 * 2 * 2  # keys and values, layers, heads, features
    assert memory.rolling["keys and values"] == 8 * 51 * per_token * 4
    assert memory.rolling["copy that decodes"] == 0  # float32 decodes with the masters


def test_every_host_has_rows_of_its_own():
    each = 8 * 51 * (2 * 2 * 2 * 2) * 4
    for num_devices, host_devices, here in [
        (8, 8, 8),
        (16, 8, 8),
        (16, 4, 4),
        (2, 4, 2),
    ]:
        c = config(
            **{
                "models.writer.source": "Qwen/Qwen2.5-7B",
                "models.writer.max_concurrent": 1,
            }
        )
        memory = memory_of(c, "rl", SPEC, num_devices, host_devices=host_devices)
        assert memory.rolling["keys and values"] == each / here
        asked = 2 * 28 * 4 * 128 * 4 * (2 * 1024 + 64)
        assert memory.rolling["writer's keys and values"] == asked / here


def test_a_mesh_splits_weights_and_rows():
    c = config(**{"mesh.fsdp": 2, "mesh.tensor": 2, "model.dtype": "bfloat16"})
    memory = memory_of(c, "rl", SPEC, 4)
    assert memory.resident["weights"] == 4 * PARAMS / 4
    assert memory.rolling["copy that decodes"] == 2 * PARAMS / 2
    assert memory.rolling["keys and values"] == 8 * 51 * 16 * 2 / 4


def test_a_vocabulary_that_cannot_be_split_is_whole_on_every_device():
    odd = dataclasses.replace(SPEC, vocab_size=101)
    c = config(**{"mesh.fsdp": 2, "mesh.tensor": 2})
    check_layout(c, odd)
    here = (2 * 592 + 8) / 2 + 2 * 101 * 8
    memory = memory_of(c, "rl", odd, 4)
    assert memory.resident["weights"] == 4 * here / 2
    assert memory.rolling["copy that decodes"] == 4 * here


def test_the_backward_pass_keeps_the_activations_of_one_layer_or_of_all():
    rows, scores = 1, 4 * 51**2 * 4 * costs.SCORE_COPIES  # pieces of one row
    kept = memory_of(config(), "rl", SPEC, 1)
    again = memory_of(config(**{"model.remat": True}), "rl", SPEC, 1)
    for actual in (kept, again):  # a row as short as this is one block
        assert actual.updating["attention scores"] == rows * scores
    inside = "inside of a layer"
    assert kept.updating[inside] == 2 * again.updating[inside]


@pytest.mark.parametrize(
    ("micro_batch", "fsdp", "rows"), [(16, 1, 2), (20, 1, 3), (8, 4, 1), (64, 4, 2)]
)
def test_a_device_holds_its_share_of_the_rows_computed_together(
    micro_batch, fsdp, rows
):
    c = config(**{"rl.micro_batch": micro_batch, "mesh.fsdp": fsdp})
    memory = memory_of(c, "rl", SPEC, fsdp)
    scores = 4 * 51**2 * 4 * costs.SCORE_COPIES
    assert memory.updating["attention scores"] == rows * scores
    one = to_micro_batches(pack_segments([()] * micro_batch, 8), micro_batch)
    layout = pack_micro_batches(one, multiple=fsdp).layout
    assert layout.source.shape[2] == rows * fsdp


def test_the_peak_is_the_larger_of_two_phases():
    memory = costs.Memory({"a": 1.0}, {"b": 5.0, "c": 1.0}, {"d": 4.0})
    assert memory.peak == 7.0


def test_a_stage_that_only_rolls_out_has_no_moments_and_no_gradients():
    memory = memory_of(config(), "curate", SPEC, 1)
    assert set(memory.resident) == {"weights"}
    assert memory.updating == {}


def test_a_judge_that_runs_here_is_counted_and_an_endpoint_is_not():
    name = "meta-llama/Llama-3.2-3B-Instruct"
    memory = memory_of(config(**{"models.judge.source": name}), "rl", SPEC, 1)
    assert memory.resident["judge's weights"] == 4 * PUBLISHED[name].num_params
    for source in ("http://localhost:8000/v1", "world:judge"):
        memory = memory_of(config(**{"models.judge.source": source}), "rl", SPEC, 1)
        assert "judge's weights" not in memory.resident
        assert all("judge" not in what for what in memory.rolling)


def test_a_model_next_to_the_policy_is_held_only_in_the_form_that_decodes(tmp_path):
    written = make_config(SPEC, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(written))
    asked = {"source": str(tmp_path), "max_concurrent": 3}
    c = config(
        **{f"models.judge.{name}": value for name, value in asked.items()},
        **{"models.judge.max_prompt_tokens": 10, "models.judge.max_reply_tokens": 6},
        **{f"models.writer.{name}": value for name, value in asked.items()},
        **{"models.writer.max_prompt_tokens": 20, "models.writer.max_reply_tokens": 6},
        **{"mesh.fsdp": 2, "mesh.tensor": 2, "model.dtype": "bfloat16"},
    )
    memory = memory_of(c, "rl", SPEC, 4)
    assert (
        memory.resident["judge's weights"] == 2 * PARAMS / 2
    )  # fsdp does not split them
    assert memory.resident["writer's weights"] == 2 * PARAMS / 2
    # Prompts, and next to them the rows they are copied into; 16 numbers per token.
    assert memory.rolling["writer's keys and values"] == 3 * (2 * 20 + 6) * 16 * 2 / 4
    assert "judge's keys and values" not in memory.rolling  # these rollouts have ended
    more = apply_overrides(c, {"models.judge.max_concurrent": 300})
    tokens = 300 * (2 * 10 + 6)
    assert memory_of(more, "rl", SPEC, 4).rolling == {  # and hold no memory any more
        "copy that decodes": 2 * PARAMS / 2,
        "judge's keys and values": tokens * 16 * 2 / 4,
    }
    memory = memory_of(c, "curate", SPEC, 4)
    assert [*memory.resident] == ["weights", "writer's weights"]  # it rewards nothing


def test_a_rewriter_that_the_run_trains_is_as_large_as_its_model():
    c = config(
        **{"models.rewriter.source": "stage:sft_rewriter", "model.vocab_size": 10}
    )
    size = 4 * costs.shape_of("", c).num_params
    memory = memory_of(c, "rl", SPEC, 1)
    assert memory.resident["rewriter's weights"] == size


def test_a_shape_is_published_or_read_or_set_or_not_known_yet(tmp_path):
    c = config()
    assert costs.shape_of("Qwen/Qwen2.5-7B", c) is PUBLISHED["Qwen/Qwen2.5-7B"]
    written = make_config(SPEC, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert costs.shape_of(str(tmp_path), c) == SPEC
    assert costs.shape_of("", c) is None  # the tokenizer decides the vocabulary
    assert costs.shape_of("", config(**{"model.vocab_size": 7})).vocab_size == 7
    assert costs.shape_of("world:base", c) is None
    with pytest.raises(ValueError, match="'no/model': its shape is not known"):
        costs.shape_of("no/model", c)


def test_a_context_beyond_the_models_is_refused_with_the_arithmetic():
    c = config(**{"rollout.max_turn_tokens": 43})
    text = r"rl: prompt 10 \+ 4 turns x 43 \+ 3 observations x 7 = 203 tokens, but"
    with pytest.raises(ValueError, match=text):
        costs.check_context(c, "rl", SPEC)
    costs.check_context(config(**{"rollout.max_turn_tokens": 42}), "rl", SPEC)


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ValueError, match=r"tensor = 4.* num_kv_heads.*be 1 or 2$"):
        check_layout(config(**{"mesh.tensor": 4}), SPEC)
    with pytest.raises(ValueError, match="fsdp = 3 does not divide the width 8"):
        check_layout(config(**{"mesh.fsdp": 3}), SPEC)
    check_layout(config(**{"mesh.fsdp": 4, "mesh.tensor": 2}), SPEC)


def rows_of(memory, *, kind="rl", devices=8, questions=8, **overrides):
    """Return (max_concurrent, cache_tokens) chosen for devices of `memory` bytes."""
    sizes = {"rl.questions_per_step": questions, "rollout.group_size": 5}
    c = config(**{"rollout.max_concurrent": 0, **sizes, **overrides})
    chosen = costs.with_rows(
        c, kind, SPEC, num_devices=devices, host_devices=8, memory=memory
    )
    assert c.rollout.max_concurrent == 0
    return chosen.rollout.max_concurrent, chosen.rollout.cache_tokens


# A rollout has 51 tokens, each with keys and values of 2 layers x 2 x 2 heads x 2, and
# 100 logits, all in 4 bytes; eight devices share the rollouts.
ROLLOUT = 51 * 2 * 2 * 2 * 2 * 4 / 8 + 100 * 4 / 8
RESIDENT = 4 * 4 * PARAMS  # weights, two moments and the initial weights


def test_rollouts_ahead_on_one_device_stay_there_during_the_update():
    ahead = config(**{"rl.max_staleness": 1})
    memory, plain = (memory_of(c, "rl", SPEC, 1) for c in (ahead, config()))
    both = plain.rolling | plain.updating | {"copy that decodes": 4 * PARAMS}
    assert memory.updating == both and memory.rolling == plain.rolling
    offloaded = config(**{"rl.max_staleness": 1, "model.offload": ("optimizer",)})
    assert memory_of(offloaded, "rl", SPEC, 1).stepping.keys() > plain.rolling.keys()
    update = RESIDENT + sum(plain.updating.values()) + 4 * PARAMS
    room = update + 7.5 * 8 * ROLLOUT  # no other device shares the rollouts
    assert rows_of(room, devices=1, **{"rl.max_staleness": 1}) == (7, 0)
    assert rows_of(room, devices=1)[0] > 7


def test_all_rollouts_of_a_step_decode_together_if_they_fit():
    assert rows_of(RESIDENT + 40 * ROLLOUT) == (40, 0)  # 8 questions x 5
    assert rows_of(math.inf) == (40, 0)
    # Each of two hosts has 4 questions, 20 rollouts: 3 rows on each of its 8 devices.
    assert rows_of(math.inf, devices=16) == (24, 0)
    # Each host has rows of its own, also if one program spans all hosts.
    shared, memory = {"rollout.global_mesh": True}, RESIDENT + 17 * ROLLOUT
    assert rows_of(memory, devices=16) == (16, 0)
    assert rows_of(memory, devices=16, **shared) == (16, 0)
    assert rows_of(math.inf, kind="curate") == (costs.MOST_ROWS, 0)
    assert rows_of(math.inf, questions=5) == (32, 0)


def test_rows_of_an_evaluation_leave_room_for_the_models_that_it_calls(tmp_path):
    """Its rollouts have the policy's limits, even if a data stage's may be longer."""
    longer = {"curate.method": "answerable", "curate.retry_searches": 9}
    weights, paged = 4 * PARAMS, {"rollout.page_tokens": 16}
    rows = rows_of(weights + 39 * ROLLOUT, kind="sft", **longer, **paged)
    assert rows == (64, 32 * 51)
    (tmp_path / "config.json").write_text(
        json.dumps(make_config(SPEC, dtype="float32"))
    )
    asked = longer | {"models.eval_judge.source": str(tmp_path)}
    assert rows_of(2 * weights + 20 * ROLLOUT, kind="sft", **asked)[0] == 16


def test_an_evaluation_copies_no_8_bit_kernels():
    c = config(**{"model.dtype": "bfloat16", "rollout.int8_kernels": True})
    c = apply_overrides(c, {"eval.methods": ("protocol",)})
    evaluating = memory_of(c, "sft", SPEC, 1).evaluating
    assert evaluating["copy that decodes"] == 2 * PARAMS


def test_pages_hold_twice_as_many_rollouts_as_fit_at_their_longest():
    paged = {"rollout.page_tokens": 16}
    assert rows_of(RESIDENT + 39 * ROLLOUT, questions=16, **paged) == (64, 32 * 51)
    assert rows_of(RESIDENT + 39 * ROLLOUT, **paged) == (40, 32 * 51)
    # No room for two of the longest on each device, of four pages and one for tags.
    assert rows_of(RESIDENT + 31 * ROLLOUT, **paged) == (24, 0)
    assert rows_of(RESIDENT + 39 * ROLLOUT) == (32, 0)  # pages of 128
    # The number of pages that a user has set is kept.
    own = {"rollout.cache_tokens": 999}
    assert rows_of(RESIDENT + 23.9 * ROLLOUT, **own) == (40, 999)


def test_rollouts_that_do_not_fit_at_all_are_refused():
    with pytest.raises(ValueError, match=r"max_concurrent = 0: .* no room for 8"):
        rows_of(RESIDENT + 7 * ROLLOUT)


def test_a_configured_number_of_rollouts_is_kept():
    c = config()
    sizes = dict(num_devices=8, host_devices=8, memory=0.0)
    assert costs.with_rows(c, "rl", SPEC, **sizes) is c


def test_8_bit_kernels_are_copied_only_for_an_rl_step():
    c = config(**{"model.dtype": "bfloat16", "rollout.int8_kernels": True})
    embedded = 2 * 800
    copies = [
        memory_of(c, kind, SPEC, 1).rolling["copy that decodes"]
        for kind in ("rl", "curate")
    ]
    assert copies == [2 * embedded + PARAMS - embedded, 2 * PARAMS]
