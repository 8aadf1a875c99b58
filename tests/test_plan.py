"""Plans of recipes for TPUs and GPUs that are not present."""

import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from rsearch.config import recipes as configuration
from rsearch.config.stage_plan import num_decode_rows, stage_configs
from rsearch.index import main as build_index
from rsearch.models.hf.families import make_config
from rsearch.plan import command as plan
from rsearch.plan.costs import context_of, memory_of, shape_of
from rsearch.plan.hlo import Traffic
from rsearch.plan.machines import CHIPS, find_machine
from rsearch.plan.programs import (
    Program,
    device_bytes,
    filled_once,
    make_context,
    stage_programs,
)
from rsearch.plan.roofline import estimate_traced

SHAPE = {  # heads of 128, as large models have: tiles are full
    "model.vocab_size": 512,
    "model.width": 256,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 128,
    "model.dtype": "bfloat16",
    "mesh.tensor": 2,
    "rl.kl_coef": 0.01,
}


def recipe(**overrides):
    c = configuration.load("configs/quickstart.py")
    return configuration.apply_overrides(c, SHAPE | overrides)


def planned(config, machine, only):
    """Return {stage: its estimates}."""
    stages = plan.checked_stages(config, machine, only=only)
    return plan.estimates_of_stages(stages, machine)


@pytest.fixture(scope="module")
def slice_of_four():
    pytest.importorskip("libtpu")
    return find_machine("v5e:2x2")


# Slow; faster tests below compile decoding for a slice, and plan for GPUs.
@pytest.mark.slow
def test_a_recipe_is_compiled_for_a_slice_and_fits(slice_of_four, tmp_path, capsys):
    flags = [f"--config.{name}={value}" for name, value in SHAPE.items()]
    out = tmp_path / "plan.json"
    recipe = "--config=configs/quickstart.py"
    code = plan.command(
        [recipe, "--topology=v5e:2x2", "--stage=rl", f"--out={out}", *flags]
    )
    said = capsys.readouterr()
    assert code == 0 and "fits v5e:2x2" in said.out + said.err
    rows = {row["program"]: row for row in json.loads(out.read_text())}
    assert [*rows] == ["prefill", "admit", "extend", "decode", "score", "update"]
    for row in rows.values():
        assert 0 < row["peak_bytes"] < row["memory_bytes"] == CHIPS["v5e"].memory
        assert row["seconds"] > 0 and row["bound"] in ("FLOPs", "memory", "links")
    # Each row of a step is scored once (forward) and updated on once (and backward).
    assert rows["update"]["flops"] > 2.5 * rows["score"]["flops"] > 0
    assert rows["update"]["collectives"]["all-reduce"] > 0


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    """{number of GPUs: (rows of the plan, what it printed)}, for few rollouts."""
    shape = SHAPE | {"rollout.max_concurrent": 8}
    fields = [f"--config.{name}={value}" for name, value in shape.items()]
    plans = {}
    for count in (8, 4):
        out = tmp_path_factory.mktemp("plan") / "plan.json"
        argv = ["--config=configs/quickstart.py", "--stage=rl", f"--out={out}"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert plan.command([f"--topology=a100x{count}", *argv, *fields]) == 0
        plans[count] = json.loads(out.read_text()), said.getvalue()
    return plans


def test_a_gpu_nodes_costs_are_estimated_without_a_compiler_for_it(on_gpus):
    whole, said = on_gpus[8]
    assert "an estimate: nothing was compiled" in said
    assert "92% of their memory" in said
    rows = {row["program"]: row for row in whole}
    assert [*rows] == ["prefill", "admit", "extend", "decode", "score", "update"]
    # With half the devices, each does twice the work.
    for row in on_gpus[4][0]:
        assert row["memory_bytes"] == 0.92 * 80e9 and row["collectives"] == {}
        if row["program"] in ("score", "update"):
            assert row["flops"] == 2 * rows[row["program"]]["flops"] > 0


def test_rows_of_a_small_model_decode_together_on_one_gpu():
    """The plan uses CPUs, which would decode in blocks (see rollout/decode.py)."""
    c = recipe(**{"mesh.tensor": 1, "rollout.max_concurrent": 64})
    c = dict(stage_configs(c))["rl"]
    flops = {}
    for count in (2, 1):
        machine = find_machine(f"a100x{count}")
        programs = stage_programs(make_context(c, "rl", machine), "rl", machine)
        (decode,) = [p for p in programs if p.name == "decode"]
        memory = memory_of(c, "rl", shape_of("", c), count, host_devices=count)
        flops[count] = estimate_traced(decode, memory).flops
    assert flops[1] == pytest.approx(2 * flops[2], rel=0.05)


def test_rows_are_admitted_without_reading_the_cache_of_all():
    machine, moved = find_machine("a100x1"), []
    for tokens in (1, 2000):
        shape = {"mesh.tensor": 1, "rollout.max_turn_tokens": tokens}
        (estimates,) = planned(recipe(**shape), machine, "rl").values()
        moved += [e.moved.memory for e in estimates if e.name == "admit"]
    assert moved[0] == pytest.approx(moved[1], rel=0.01)


def test_offloaded_moments_are_counted_in_the_optimizers_step():
    away = {"mesh.tensor": 1, "model.offload": ("optimizer",)}
    config, machine = recipe(**away), find_machine("a100x1")
    (actual,) = planned(config, machine, "rl").values()
    peaks = {one.name: one.peak for one in actual}
    whole = 4 * shape_of("", config).num_params
    # Weights, the reference's weights, gradients and two moments.
    assert peaks["update's step"] == 5 * whole != peaks["update's gradient"]


@pytest.mark.slow
def test_plans_of_a_data_stage_and_an_evaluation_agree_with_the_dry_run(
    tmp_path, capsys
):
    out = tmp_path / "plan.json"
    argv = ["--config=configs/rag_r1.py", "--topology=h200x8", f"--out={out}"]
    slots = "--config.overrides.curate_rl.rollout.max_concurrent=160"
    assert plan.command([*argv, slots]) == 1
    rows = json.loads(out.read_text())
    rolling = ["prefill", "admit", "extend", "decode"]
    actual = {}
    for row in rows:
        actual.setdefault(row["stage"], []).append(row["program"])
    assert [*actual] == ["curate_sft", "sft", "sft, evaluation", "curate_rl", "rl"]
    for name in ("curate_sft", "sft, evaluation", "curate_rl"):
        assert actual[name] == rolling
    said = capsys.readouterr()
    assert "does not fit: curate_rl, decode" in said.out + said.err
    c = configuration.load("configs/rag_r1.py")
    for stage, own in stage_configs(c):
        if stage in ("curate_sft", "sft"):
            spec = shape_of(own.model.source, own)
            memory = memory_of(own, stage, spec, 8, host_devices=8)
            peaks = [r["peak_bytes"] for r in rows if r["stage"].startswith(stage)]
            assert max(peaks) == pytest.approx(memory.peak)


def test_stages_that_were_not_planned_are_named_if_the_others_fit(tmp_path, capsys):
    written = make_config(shape_of("", recipe()), dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(written))
    argv = ["--config=configs/rag_r1.py:tiny,sq,grpo", "--topology=a100x1"]
    assert plan.command([*argv, f"--config.model.source={tmp_path}"]) == 0
    said = capsys.readouterr()  # its teacher is made by the run
    assert "fits a100x1; not planned: curate_sft, curate_rl" in said.out + said.err


def test_a_plan_without_any_known_model_is_refused(capsys):
    argv = ["--config=configs/rag_r1.py:tiny,sq,grpo", "--topology=a100x1"]
    argv += ["--stage=curate_sft", "--config.rollout.max_concurrent=0"]
    with pytest.raises(ValueError, match=r"curate_sft: config\.model\.source = "):
        plan.command(argv)
    assert "0 rollouts at once" not in capsys.readouterr().err


def test_each_step_of_a_chain_reads_everything_before_it(tmp_path):
    out = tmp_path / "plan.json"
    argv = ["--config=configs/rearag.py", "--topology=a100x8", f"--out={out}"]
    assert plan.command([*argv, "--stage=curate"]) == 0
    rows = {row["program"]: row for row in json.loads(out.read_text())}
    assert [*rows] == ["prefill", "admit", "decode"]
    ((_, own), _) = stage_configs(configuration.load("configs/rearag.py"))
    # Every step, and every retried one, reads a prompt as long as a whole chain without
    # its last turn.
    prompts = (25 + 20) * own.rollout.max_concurrent * (4096 + 24 * (256 + 256))
    params = shape_of(own.model.source, own).num_params
    assert rows["prefill"]["flops"] > 2 * params * prompts / 8 * 0.9


@pytest.mark.parametrize(
    ("method", "names", "prompts"),
    [
        # A round of three rollouts of a question shares the prompt's prefill; a
        # chain without reasoning is one turn, and no other shares its prompt.
        ("whole", ["prefill", "admit", "extend", "decode"], 24 / 3),
        ("no_reasoning", ["prefill", "admit", "decode"], 24),
    ],
)
def test_rollouts_of_a_data_stage_share_prompts_as_they_do_in_a_run(
    method, names, prompts
):
    machine = find_machine("a100x1")
    curate = {"curate.method": method, "curate.rollouts": 3, "rollout.group_size": 6}
    sizes = {"mesh.tensor": 1, "rollout.max_concurrent": 24, "stages": ("curate",)}
    c = dict(stage_configs(recipe(**curate, **sizes)))["curate"]
    programs = stage_programs(make_context(c, "curate", machine), "curate", machine)
    assert [p.name for p in programs] == names
    assert programs[0].calls * programs[0].args[1].shape[0] == prompts


@pytest.mark.slow
def test_a_slice_compiles_a_data_stage(slice_of_four):
    c = recipe(stages=("curate", "rl"))
    (actual,) = planned(c, slice_of_four, "curate").values()
    assert [one.name for one in actual] == ["prefill", "admit", "extend", "decode"]
    assert all(one.peak > 0 and one.moved.memory > 0 for one in actual)


# With two heads' keys and values on each device, and with one head's.
@pytest.mark.parametrize("tensor", [1, 2])
def test_decoding_a_token_never_copies_the_cache_of_all_layers(slice_of_four, tensor):
    """XLA once copied the whole cache for each layer: reads and writes must agree."""
    # With so many layers, copies for each of them are far more than is needed.
    c = recipe(**{"mesh.tensor": tensor, "model.num_layers": 6})
    ((_, own),) = [s for s in stage_configs(c) if s[0] == "rl"]
    frame = make_context(own, "rl", slice_of_four)
    programs = stage_programs(frame, "rl", slice_of_four)
    (decode,) = [p for p in programs if p.name == "decode"]
    actual = plan.estimate(decode, slice_of_four)
    params, rows = decode.args[:2]
    read = device_bytes(params) + device_bytes(rows.context)
    assert actual.moved.memory / decode.rounds < 3 * read


@pytest.mark.parametrize(
    ("topology", "overrides", "message"),
    [
        ("v9:2x2", {}, "--topology=v9:2x2: must be a TPU slice such as"),
        ("v5e:3x3", {}, "--topology=v5e:3x3: "),
        ("a100x9", {}, "or a GPU node such as a100x8"),
        ("v5e:2x2", {"model.vocab_size": 0}, "is not known before the run makes it"),
        (
            "v5e:2x2",
            {"mesh.fsdp": 4},
            "fsdp 4 x tensor 2, but there are 4 devices",
        ),
        ("v5e:8x8", {}, "compiles nothing for a part of a slice"),
    ],
)
def test_an_impossible_plan_is_refused(topology, overrides, message):
    pytest.importorskip("libtpu")
    with pytest.raises(ValueError, match=message):
        planned(recipe(**overrides), find_machine(topology), "rl")


def test_as_many_rollouts_as_the_plan_has_room_for_fill_a_devices_memory(on_gpus):
    machine, step = find_machine("a100x2"), {"rl.questions_per_step": 2**18}

    def room(estimates, **overrides):
        c = dict(stage_configs(recipe(**overrides)))["rl"]
        return plan.room_for_rollouts(c, "rl", machine, estimates)

    def rolling(**overrides):
        estimates = planned(recipe(**overrides), machine, "rl")["rl"]
        peak = max(e.peak for e in estimates if e.name in plan.ROLLOUT_PROGRAMS)
        return estimates, peak

    estimates, peak = rolling(**step)
    assert peak < 0.1 * machine.chip.memory
    full = {"rollout.max_concurrent": room(estimates, **step)}
    assert rolling(**step, **full)[1] == pytest.approx(
        plan.FULL * machine.chip.memory, rel=0.01
    )
    # A step's rollouts and config.rollout.cache_tokens limit the room.
    c = recipe()
    assert room(estimates) == c.rl.questions_per_step * c.rollout.group_size
    assert room(estimates, **{"rollout.cache_tokens": 4096}) == 0
    for _, said in on_gpus.values():
        assert "memory for about" in said


def test_room_for_rollouts_is_found_even_if_the_judge_needs_more_memory():
    machine = find_machine("a100x1")
    judged = {"models.judge.source": "Qwen/Qwen2.5-3B", "mesh.tensor": 1}
    c = dict(stage_configs(recipe(**judged)))["rl"]
    spec = shape_of("", c)
    rolling = memory_of(c, "rl", spec, 1, host_devices=1).rolling
    assert "keys and values" not in rolling  # the rollouts have ended by then
    full = plan.FULL * machine.chip.memory
    each = 2 * 2 * 2 * 128 * 2 * context_of(c, "rl")[1] + 4 * 512
    decode = plan.Estimate(
        "decode", 1, full - 3.5 * each, 0.0, Traffic(0.0, {}), 0.0, {}
    )
    c.rollout.max_concurrent = 8
    assert plan.room_for_rollouts(c, "rl", machine, [decode]) == 8 + 3


@pytest.mark.parametrize(
    "field", ["mesh.tensor", "rollout.page_tokens", "rl.micro_batch"]
)
def test_a_field_out_of_its_bounds_is_refused_before_it_is_used(field):
    argv = ["--config=configs/r_search.py", "--topology=a100x1"]
    argv += ["--config.rollout.max_concurrent=0", f"--config.{field}=0"]
    lengths = "--lengths=searches=1,policy_tokens=20,tokens=100"
    with pytest.raises(ValueError, match=f"config.{field} = 0"):
        plan.command([*argv, lengths])


def test_the_host_with_the_most_questions_counts():
    pytest.importorskip("libtpu")
    machine = find_machine("v5p:2x2x2")  # two hosts
    sizes = {"rl.questions_per_step": 3, "rl.updates_per_step": 1, "mesh.tensor": 1}
    c = dict(stage_configs(recipe(**sizes, **{"rollout.max_concurrent": 8})))["rl"]
    programs = stage_programs(make_context(c, "rl", machine), "rl", machine)
    (decode,) = [p for p in programs if p.name == "decode"]
    limits = make_context(c, "rl", machine).limits
    # Two of the three questions, each with eight rollouts on eight rows.
    assert decode.rounds == 2 * limits.num_turns * limits.max_turn_tokens


def test_an_evaluation_prefills_a_prompt_once_for_all_of_its_samples():
    machine = find_machine("a100x1")
    calls = []
    for samples in (1, 4):
        c = recipe(**{"mesh.tensor": 1, "eval.samples": samples})
        c = dict(stage_configs(c))["sft"]
        programs = filled_once(make_context(c, "rl", machine), "sft", machine)
        (prefill,) = [p for p in programs if p.name == "prefill"]
        calls.append(prefill.calls * prefill.args[1].shape[0])
    assert c.rollout.group_size == 8
    assert calls == [c.rollout.max_concurrent, c.rollout.max_concurrent / 4]


def test_a_context_limits_what_rollouts_write_and_read():
    machine = find_machine("a100x1")
    c = recipe(**{"mesh.tensor": 1, "rollout.context_tokens": 90})
    c = configuration.apply_overrides(
        c, {"rollout.max_turn_tokens": 20, "rollout.max_observation_tokens": 24}
    )
    c = dict(stage_configs(c))["rl"]
    c = configuration.apply_overrides(
        c, {"rollout.max_searches": 7, "rollout.max_concurrent": 8}
    )
    programs = stage_programs(make_context(c, "rl", machine), "rl", machine)
    counts = {p.name: (p.calls, p.rounds, p.args) for p in programs}
    rollouts = c.rl.questions_per_step * c.rollout.group_size
    extends, _, (_, _, rows, *_) = counts["extend"]
    # An observation leaves room for a turn; there are seven in a larger context.
    assert extends * rows.shape[0] == pytest.approx(rollouts * (90 - 20) / 24)
    assert counts["decode"][1] == 90 * rollouts / 8  # not eight turns of 20 tokens


def test_an_unwritable_file_is_refused_before_anything_is_compiled():
    argv = ["--config=configs/quickstart.py", "--topology=a100x1", "--out=/no/x"]
    with pytest.raises(ValueError, match="--out=/no/x: there is no directory /no"):
        plan.command(argv)


def test_an_unknown_stage_of_a_plan_is_refused(slice_of_four):
    with pytest.raises(ValueError, match="--stage=rk: must be one of sft, rl"):
        planned(recipe(), slice_of_four, "rk")


def resident(machine, **overrides):
    """Return {program: bytes on each device of its arguments and of other arrays}."""
    ((_, own),) = [s for s in stage_configs(recipe(**overrides)) if s[0] == "rl"]
    programs = stage_programs(make_context(own, "rl", machine), "rl", machine)
    return {p.name: p.other_bytes + device_bytes(p.args) for p in programs}


def test_adapters_and_offloading_free_memory_on_the_devices(
    slice_of_four,
):
    """Counted in shards of float32 weights: the weights, the moments, the reference."""
    plain = resident(slice_of_four)
    whole = 4 * shape_of("", recipe()).num_params
    weights = pytest.approx(whole / 2, rel=0.01)  # sharded in two, except for norms
    half = resident(slice_of_four, **{"optim.moments_dtype": "bfloat16"})
    assert all(plain[name] - half[name] == weights for name in plain)
    away = resident(slice_of_four, **{"model.offload": ("optimizer", "reference")})
    assert away.keys() - plain.keys() == {"update's gradient", "update's step"}
    for name in ("prefill", "admit", "extend", "decode"):
        assert (plain[name] - away[name]) / 3 == weights
    assert (plain["score"] - away["score"]) / 2 == weights  # scored with the reference
    assert (plain["update"] - away["update's gradient"]) / 3 == weights
    assert plain["update"] == pytest.approx(away["update's step"], rel=0.05)
    low = resident(slice_of_four, **{"model.lora_rank": 1})
    assert low.keys() - plain.keys() == {"merge"}
    assert low["merge"] == pytest.approx(whole / 2, rel=0.05)  # one copy, and adapters
    for name in plain:
        assert (plain[name] - low[name]) / 3 == pytest.approx(whole / 2, rel=0.05)


def test_weights_that_decode_without_a_copy_are_counted_once():
    """In float32 without fsdp they are those that train; shards must be gathered."""
    machine, half = find_machine("a100x4"), 4 * shape_of("", recipe()).num_params / 2
    for fsdp, num_copies in ((1, 0), (2, 1)):
        shape = {"model.dtype": "float32", "mesh.fsdp": fsdp}
        c = dict(stage_configs(recipe(**shape)))["rl"]
        programs = stage_programs(make_context(c, "rl", machine), "rl", machine)
        (admit,) = [p for p in programs if p.name == "admit"]  # it takes no weights
        # Weights, two moments and the reference, and the copy.
        held = 4 * half / fsdp + num_copies * half
        assert admit.other_bytes == pytest.approx(held, rel=0.01)


def test_rollouts_ahead_on_one_device_count_for_the_programs_that_learn():
    machine = find_machine("a100x1")
    one, other = (
        resident(machine, **{"mesh.tensor": 1, "rl.max_staleness": n}) for n in (0, 1)
    )
    assert other["decode"] == one["decode"]
    more = {name: other[name] - one[name] for name in ("score", "update")}
    params = 2 * shape_of("", recipe()).num_params
    assert more["score"] == more["update"] > params


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return the path of an index of 64 passages."""
    folder = tmp_path_factory.mktemp("index")
    corpus, index = folder / "corpus.jsonl", folder / "index"
    lines = [json.dumps({"id": f"c{i}", "contents": f"city {i}"}) for i in range(64)]
    corpus.write_text("\n".join(lines))
    flags = [f"--corpus={corpus}", "--encoder=hashed", f"--out={index}"]
    assert configuration.run_command(build_index, [*flags, "--parts=1"]) == 0
    return str(index)


def test_every_host_of_stand_ins_holds_the_vectors_of_an_index(index):
    machine = dataclasses.replace(find_machine("v5p-8"), hosts=2)
    peaks = []
    for on_devices in (False, True):
        held = {"retrieval.index": index, "retrieval.on_devices": on_devices}
        c = dict(stage_configs(recipe(**held)))["rl"]
        (estimates,) = plan.estimates_of_stages([("rl", c)], machine).values()
        peaks.append([one.peak for one in estimates])
    vectors = 64 * recipe().retrieval.hashed_dim * 2 / 2  # two devices of each host
    assert peaks[1] == [peak + vectors for peak in peaks[0]]


def test_vectors_of_an_index_on_the_devices_count_for_every_program(index):
    machine, searched = find_machine("a100x2"), {"retrieval.index": index}
    plain, held = (
        resident(machine, **searched, **{"retrieval.on_devices": on_devices})
        for on_devices in (False, True)
    )
    vectors = 64 * recipe().retrieval.hashed_dim * 2 / 2
    assert held == {name: size + vectors for name, size in plain.items()}


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("XLA:TPU: Ran out of memory. Used 18.50G of 15.75G hbm", 18.5 * 2**30),
        ("XLA:TPU: Ran out of memory. Used 1.25T of 15.75G hbm", 1.25 * 2**40),
        ("HLO temporaries (900.00M) exceeds available HBM", 900 * 2**20),
        ("INTERNAL: something else", None),
    ],
)
def test_the_memory_that_a_program_needs_is_read_from_the_compilers_error(
    message, needed
):
    def function(x):
        return x

    def lower(*_):
        raise jax.errors.JaxRuntimeError(message)

    function.lower = lower
    program = Program("update", function, (np.zeros(2),), 1, 1, 7.0, 1)
    machine = find_machine("a100x1")
    if needed is None:
        with pytest.raises(ValueError, match="does not compile for a100x1: INTERNAL"):
            plan.estimate(program, machine)
    else:
        assert plan.estimate(program, machine).peak == needed + 7


@pytest.mark.parametrize(
    ("most", "num_rollouts", "rows"),
    [
        *((256, 512, 256), (256, 256, 256), (256, 64, 64), (256, 65, 128)),
        *((256, 1, 16), (40, 1, 40), (80, 1, 80), (160, 8, 80)),
    ],
)
def test_rows_that_decode_are_halved_while_a_steps_rollouts_fit(
    most, num_rollouts, rows
):
    """Half of the rows must be a multiple of 16 too."""
    assert num_decode_rows(most, num_rollouts) == rows
