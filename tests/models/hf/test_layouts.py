"""Checkpoints of other tools are named, with a command that converts every shard."""

import json
import shlex
import subprocess
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rsearch.models.bert import load_bert
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.directory import find_model, open_tensors
from rsearch.models.hf.families import read_spec
from rsearch.models.hf.layouts import convert_command
from tests.models.tiny_bert import write_tiny_bert

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
PICKLE = b"PK\x03\x04"
RANKS = {f"model_world_size_2_rank_{rank}.pt": b"" for rank in range(2)}
LORA = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
TAG = {
    "mp_rank_00_model_states.pt": b"",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": b"",
}
CONFIG = {"config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}}
SHARDS = {f"pytorch_model-{n:05}-of-00003.bin": PICKLE for n in (1, 2, 3)}
TOKENIZER = {"tokenizer.json": {}, "tokenizer_config.json": {}}


def write(directory, files):
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps(content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def under(folder, files):
    return {f"{folder}/{name}": content for name, content in files.items()}


def refusal(directory):
    """Return the error of a run whose policy's model is this directory."""
    with pytest.raises(ValueError) as caught:
        source = find_model(directory)
        read_spec(source)
    return str(caught.value)


def weights_refusal(directory):
    with pytest.raises(ValueError) as caught:
        open_tensors(directory)
    return str(caught.value)


VERL = "python -m verl.model_merger merge --backend {} --local_dir {} --target_dir"
DCP = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {}"
ZERO = "python -m deepspeed.utils.zero_to_fp32 {} {} --tag global_step500"


@pytest.mark.fault(71, "FSDP and verl", "PEFT", "DeepSpeed", "Megatron", "distcp")
@pytest.mark.fault(71, "GGUF", "TensorFlow, Flax, ONNX", "git-lfs pointers")
@pytest.mark.fault(71, "partial downloads", "folders")
@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("actor", RANKS | {"fsdp_config.json": {}}, (VERL.format("fsdp", "{}"),)),
        ("actor", {**RANKS, **under("huggingface", TOKENIZER)}, ("verl", "fsdp")),
        ("run/global_step_9", under("actor", RANKS), ("--local_dir {}/actor",)),
        (
            "run",
            under("global_step_9/actor", RANKS) | under("global_step_10/actor", RANKS),
            ("--local_dir {}/global_step_10/actor",),
        ),
        (
            "actor",
            {"model_world_size_8_rank_0.pt": b""},
            ("model_world_size_8_rank_1.pt", "missing"),
        ),
        (
            "actor",
            {"dist_ckpt/__0_0.distcp": b"", "huggingface/vocab.json": {}},
            (VERL.format("megatron", "{}"),),
        ),
        (
            "actor",
            RANKS | {"huggingface/model.safetensors": b""},
            ("name {}/huggingface",),
        ),
        ("a", {"adapter_config.json": LORA}, ("PEFT", "LORA", "org/base", "peft")),
        ("a", {"adapter_config.json": LORA, **TOKENIZER}, ("PEFT", "org/base")),
        (
            "a",
            {"adapter_config.json": LORA | {"base_model_name_or_path": "/no/where"}},
            ("/no/where", "not here"),
        ),
        (
            "a",
            {"adapter_config.json": LORA | {"peft_type": "PROMPT_TUNING"}},
            ("PROMPT_TUNING", "cannot be merged"),
        ),
        (
            "c",
            {**under("global_step500", TAG), "zero_to_fp32.py": "--safe_serialization"},
            ("DeepSpeed", "python {}/zero_to_fp32.py {} ", "--tag global_step500"),
        ),
        ("c", under("global_step500", TAG), (ZERO.format("{}", "{}-merged"),)),
        (
            "c",
            {"my_tag/x_optim_states.pt": b"", "latest": "my_tag\n"},
            ("DeepSpeed", "--tag my_tag"),
        ),
        ("c", {"zero_to_fp32.py": ""}, ("DeepSpeed", "global_step")),
        (
            "global_step500",
            {"mp_rank_00_model_states.pt": b""},
            ("DeepSpeed", "optim_states.pt", "missing"),
        ),
        (
            "m",
            {"iter_0000100/mp_rank_00/model_optim_rng.pt": b""},
            ("Megatron", "megatron.bridge", "BASE {} {}-merged"),
        ),
        ("iter_0000100", {"__0_0.distcp": b"", ".metadata": b""}, ("Megatron",)),
        ("d", {"__0_0.distcp": b"", ".metadata": b""}, (DCP, "model.safetensors")),
        (
            "Qwen2.5-7B",
            {"__0_0.distcp": b"", ".metadata": b""},
            (DCP.format("{} {}-merged.pt"),),
        ),
        ("d", {"__0_0.distcp": b""}, (".metadata", "lost")),
        (
            "d",
            under("pytorch_model_fsdp_0", {"__0_0.distcp": b"", ".metadata": b""}),
            (DCP.format("{}/pytorch_model_fsdp_0"),),
        ),
        ("g", {"x-Q4_K_M.gguf": b"GGUF", "x-F16.gguf": b"GGUF.."}, ("{} x-F16.gguf",)),
        (
            "g",
            {"x-00001-of-00002.gguf": b"GGUF", "x-00002-of-00002.gguf": b"GGUF"},
            ("llama-gguf-split --merge {}/x-00001-of-00002.gguf {}/x.gguf",),
        ),
        ("t", {"tf_model.h5": b""}, ("TensorFlow", "AutoModel from_tf {} {}-merged")),
        ("t", {"flax_model.msgpack": b""}, ("Flax", "from_flax")),
        ("t", {"onnx/model.onnx": b""}, ("exported",)),
        ("t", {"openvino_model.xml": b"", "openvino_model.bin": b"x"}, ("exported",)),
        ("t", {"consolidated.00.pth": PICKLE}, ("consolidated.00.pth", "slices")),
        ("l", {"pytorch_model.bin": POINTER}, ("git-lfs", "git -C {} lfs pull")),
        ("l", {"model.safetensors": POINTER}, ("git-lfs", "git -C {} lfs pull")),
        ("s", {"model-00001-of-00002.safetensors": b""}, ("index.json",)),
        (
            "p",
            {".cache/huggingface/download/x.incomplete": b""},
            ("incomplete", "hf download"),
        ),
        (
            "models--org--name/snapshots/1a",
            {"../../blobs/1b.incomplete": b"", "../../snapshots/1a/README.md": b""},
            ("incomplete", "hf download org/name"),
        ),
        (
            "f",
            {"checkpoint-9/model.safetensors": b"", "checkpoint-10/x": b""},
            ("{}/checkpoint-9",),
        ),
        ("e", {"pytorch_model.bin": PICKLE}, ("weights_only", "{}/pytorch_model.bin")),
        (
            "e",
            SHARDS,
            (" ".join(f"{{}}/pytorch_model-{n:05}-of-00003.bin" for n in (1, 2, 3)),),
        ),
        (
            "e",
            {"pytorch_model-00001-of-00003.bin": PICKLE},
            ("pytorch_model-00002-of-00003.bin is missing",),
        ),
        (
            "e",
            {"pytorch_model.bin.index.json": {"weight_map": {"a": "x.bin"}}},
            ("x.bin is missing",),
        ),
        ("e", {"ema.pt": PICKLE, "best.pt": PICKLE}, ("which may be another",)),
    ],
)
def test_the_layout_is_named_with_the_command_that_merges_it(
    tmp_path, name, files, words
):
    directory = tmp_path / name
    directory.mkdir(parents=True)
    write(directory, files)
    words = [word.replace("{}", str(directory)) for word in words]
    message = refusal(directory)
    assert not [word for word in words if word not in message], message
    # A configuration next to the files does not hide what they are.
    if (directory / "huggingface").is_dir() or "checkpoint-9/x" in files:
        return
    write(directory, CONFIG)
    message = weights_refusal(directory)
    moved = ("AutoModel ", f"{directory}-merged")  # a configuration changes these
    words = [w for w in words if not any(part in w for part in moved)]
    assert not [word for word in words if word not in message], message


def test_the_tokenizer_folder_of_a_sharded_checkpoint_may_be_named(tmp_path):
    actor = tmp_path / "actor"
    write(actor, {**RANKS, **under("huggingface", TOKENIZER | CONFIG)})
    folder = find_model(actor / "huggingface")
    assert folder == actor / "huggingface"
    assert "verl.model_merger" in weights_refusal(folder)


def test_a_run_is_named_with_the_command_that_exports_its_policy(tmp_path):
    run = {"run.json": {}, "config.json": {"name": "mine", "stages": ["sft"]}}
    write(tmp_path / "run", run)
    message = refusal(tmp_path / "run")
    assert f"rsearch.export --workdir={tmp_path / 'run'}" in message
    write(tmp_path / "run", {"model.safetensors": b"", **TOKENIZER})
    assert find_model(tmp_path / "run") == tmp_path / "run"


@pytest.mark.fault(71, "quantised weights")
@pytest.mark.parametrize("name", ["qweight", "weight.absmax", "weight_scale_inv"])
def test_quantised_weights_are_named(tmp_path, name):
    stored = {f"model.layers.0.mlp.up_proj.{name}": np.zeros(2, np.int32)}
    save_file(stored, tmp_path / "model.safetensors")
    assert "quantised" in weights_refusal(tmp_path)
    for method in ("gptq", "awq", "bitsandbytes", "fp8", None):
        quantized = {"quantization_config": {"quant_method": method}}
        for kind in ("llama", "bert"):
            write(tmp_path, {"config.json": {"model_type": kind} | quantized})
            with pytest.raises(ValueError, match=f"{method!r}: quantised"):
                (read_spec if kind == "llama" else load_bert)(tmp_path)


def test_an_adapter_next_to_full_weights_is_not_ignored(tmp_path):
    directory = write_tiny_bert(tmp_path)
    write(directory, {"adapter_config.json": LORA})
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_bert(directory)


class Tensor(str):
    """A stand-in for torch.Tensor with what the conversion needs."""

    def clone(self):
        return self

    contiguous = clone


class Torch(types.ModuleType):
    """A stand-in for torch and safetensors.torch: JSON files, strings as tensors."""

    def load(self, file, map_location, weights_only):
        assert weights_only
        with open(file) as text:
            return json.load(text, object_hook=self.with_tensors)

    def with_tensors(self, state):
        is_text = {name: isinstance(value, str) for name, value in state.items()}
        return {n: Tensor(v) if is_text[n] else v for n, v in state.items()}

    def is_tensor(self, value):
        return isinstance(value, Tensor)

    def save_file(self, tensors, path, metadata):
        with open(path, "w") as text:
            json.dump(tensors, text)


def run_program(monkeypatch, line, **modules):
    """Run the program of a line `python -c PROGRAM ARGS` in this process."""
    python, option, program, *args = shlex.split(line)
    assert (python, option) == ("python", "-c")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    monkeypatch.setattr(sys, "argv", ["-c", *args])
    exec(program, {"__name__": "__main__"})  # noqa: S102 - the package's own words


def convert(monkeypatch, directory, names):
    out, torch = directory / "model.safetensors", Torch("torch")
    line = convert_command(out, [directory / name for name in names])
    run_program(monkeypatch, line, torch=torch, safetensors__torch=torch)
    return json.loads(out.read_text())


@pytest.mark.fault(71, "pickled shards")
def test_the_conversion_joins_shards_even_with_special_characters_in_the_path(
    tmp_path, monkeypatch
):
    directory = tmp_path / 'it\'s a "model" $HOME; `x`'
    files = {"a": {"w": "1"}, "b": {"model": {"state_dict": {"v": "2"}}, "step": 3}}
    write(directory, files)
    assert convert(monkeypatch, directory, files) == {"w": "1", "v": "2"}


@pytest.mark.parametrize("files", [{"a": {"w": "1"}, "b": {"w": "2"}}, {"a": {"n": 3}}])
def test_the_conversion_fails_rather_than_lose_tensors_silently(
    tmp_path, monkeypatch, files
):
    write(tmp_path, files)
    with pytest.raises(SystemExit) as caught:
        convert(monkeypatch, tmp_path, files)
    assert caught.value.code and not (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_the_printed_command_converts_what_torch_has_saved(tmp_path):
    """Two shards hold shared tensors and views; the path has blanks and quotes."""
    torch = pytest.importorskip("torch")
    directory = tmp_path / 'it\'s a "model" $HOME; `x`'
    directory.mkdir()
    weight = torch.arange(6.0).reshape(2, 3)
    first = {"embed": weight, "head": weight, "epoch": 3}
    second = {"model": {"state_dict": {"last": weight.T}}, "optimizer": {"x": weight}}
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for name, state in zip(names, (first, second)):
        torch.save(state, directory / name)
    write(directory, CONFIG)
    command = weights_refusal(directory).splitlines()[-1]
    command = command.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], check=True)
    tensors = load_file(directory / "model.safetensors")
    assert tensors.keys() == {"embed", "head", "last"}
    np.testing.assert_array_equal(tensors["last"], weight.T.numpy())
    np.testing.assert_array_equal(tensors["head"], weight.numpy())


def recorder(calls):
    """Return an object whose attributes and calls return itself; record arguments."""

    class Recorder:
        def __getattr__(self, name):
            return self

        def __call__(self, *args, **settings):
            calls.append((args, settings))
            return self

    return Recorder()


@pytest.mark.parametrize(
    ("files", "modules", "expected"),
    [
        (
            {"adapter_config.json": LORA},
            ("peft", "transformers"),
            [("{}",), (), ("{}-merged",), ("org/base",), ("{}-merged",)],
        ),
        ({"x.gguf": b"GGUF"}, ("transformers",), [("{}",), ("{}-merged",)] * 2),
        ({"tf_model.h5": b""}, ("transformers",), [("{}",), ("{}-merged",)]),
        (
            {"iter_0000001/mp_rank_00/x.pt": b""},
            ("megatron", "megatron__bridge"),
            [("BASE",), ("{}", "{}-merged")],
        ),
    ],
)
def test_each_conversion_program_makes_the_expected_calls(
    tmp_path, monkeypatch, files, modules, expected
):
    directory = tmp_path / "a model's"
    write(directory, files)
    calls = []
    fake = recorder(calls)
    line = refusal(directory).splitlines()[-1]
    run_program(monkeypatch, line, **dict.fromkeys(modules, fake))
    place = str(directory)
    expected = [tuple(word.replace("{}", place) for word in args) for args in expected]
    assert [args for args, _ in calls] == expected


@pytest.mark.slow
def test_the_printed_command_merges_shards_of_torch_distributed(tmp_path):
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    directory = tmp_path / "a model's"
    state = {"model": {"w": torch.arange(6.0)}, "optimizer": {"w": torch.ones(2)}}
    checkpoint.save(state, checkpoint_id=directory, no_dist=True)
    command = refusal(directory).splitlines()[-1]
    command = command.replace("python ", f"{shlex.quote(sys.executable)} ")
    subprocess.run(["bash", "-c", command], check=True)
    tensors = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(tensors["w"], np.arange(6.0))


def test_a_missing_shard_is_explained_by_an_incomplete_download(tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    files = {"model.safetensors.index.json": index, "x.incomplete": b""}
    write(tmp_path, CONFIG | files)
    with pytest.raises(ValueError, match=r"is missing.*incomplete.*hf download"):
        huggingface.load_params(tmp_path, None)
