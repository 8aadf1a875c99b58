import json
import logging
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rsearch.models import sharding
from rsearch.models.decoder import param_shapes
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf import weights
from rsearch.models.hf.directory import find_model
from rsearch.models.hf.families import read_spec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.models.vocabulary import BYTE_ALPHABET
from tests.hosts.test_processes import run_hosts
from tests.models import reference

EMBED = "model.embed_tokens.weight"
SPECIAL = ["<end>", "<pad>"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directory of a small Llama, as transformers writes it; must not be changed."""
    directory = tmp_path_factory.mktemp("saved")
    reference.random_reference("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    """Copy of the same directory, which a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def change(directory, edit):
    """Rewrite the tensors of a directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(edit(tensors) or tensors, path)


def refusal(directory):
    with pytest.raises(ValueError) as caught:
        huggingface.load_params(directory, read_spec(directory))
    return str(caught.value)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


TOKENS = np.random.default_rng(0).integers(0, 160, (2, 40))


@pytest.mark.parametrize("family", list(reference.CONFIGS))
def test_an_export_loads_in_transformers_and_reloads_bit_identical(family, tmp_path):
    theirs = reference.random_reference(family)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = reference.load(tmp_path / "theirs")
    # Small shards, so that layers are split across files.
    out = tmp_path / "ours"
    huggingface.export(out, params, model.spec, max_shard_bytes=60_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(logits_of(again, TOKENS), logits_of(theirs, TOKENS))
    reread, same = reference.load(out)
    assert reread.spec == model.spec
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_a_chatglm_computes_what_transformers_computes_with_its_weights_as_a_glm(
    tmp_path,
):
    theirs = reference.random_reference("glm")
    reference.save_chatglm(theirs, tmp_path / "chatglm")
    model, params = reference.load(tmp_path / "chatglm")
    logits = reference.full_logits(model, params, TOKENS)
    np.testing.assert_allclose(logits, logits_of(theirs, TOKENS), atol=2e-5)
    huggingface.export(tmp_path / "glm", params, model.spec)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "glm")
    np.testing.assert_array_equal(logits_of(again, TOKENS), logits_of(theirs, TOKENS))


def test_a_fused_matrix_of_the_wrong_height_is_refused_by_name(tmp_path):
    theirs = reference.random_reference("glm")
    reference.save_chatglm(theirs, tmp_path / "chatglm", multi_query_group_num=3)
    text = refusal(tmp_path / "chatglm")
    assert re.search(r"query_key_value\.weight +extra", text)
    assert re.search(r"query_key_value\[q\]\.weight +missing", text)


@pytest.mark.fault(17, "dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_become_float32_exactly(dtype, saved, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    theirs.save_pretrained(tmp_path)
    _, params = reference.load(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    expected = theirs.model.layers[1].mlp.up_proj.weight.float().T.detach().numpy()
    np.testing.assert_array_equal(params["layers"]["up"][1], expected)


def test_export_in_half_precision_rounds_once(saved, tmp_path):
    model, params = reference.load(saved)
    huggingface.export(tmp_path / "out", params, model.spec, dtype="bfloat16")
    _, rounded = reference.load(tmp_path / "out")
    expected = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    jax.tree.map(np.testing.assert_array_equal, rounded, expected)


def test_sharded_files_load_straight_into_sharded_arrays(tmp_path):
    theirs = reference.random_reference("qwen2.5")
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model, whole = reference.load(tmp_path)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    shapes = param_shapes(model.spec)
    shardings = sharding.param_shardings(shapes, mesh)
    params = huggingface.load_params(tmp_path, model.spec, shardings=shardings)
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    assert params["layers"]["attention"]["o"].sharding.spec[1] == "tensor"
    up = params["layers"]["up"]
    assert {s.data.shape for s in up.addressable_shards} == {(3, 24, 40)}


EXPORT = """
import sys
from rsearch.hosts import collectives, processes
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.decoder import param_shapes
from rsearch.models.hf.families import read_spec
from rsearch.models import sharding
source, out, address, _, number = (word.rpartition("=")[2] for word in sys.argv[1:])
processes.connect(address, num_hosts=2, host=int(number))
spec = read_spec(source)
mesh = sharding.make_mesh(fsdp=2, tensor=2)
shardings = sharding.param_shardings(param_shapes(spec), mesh)
params = huggingface.load_params(source, spec, shardings=shardings)
assert not params["embedding"].is_fully_addressable
collectives.CHUNK_BYTES = 7 * 4 * spec.width  # 7 rows of the embedding at a time
huggingface.export(out, params, spec)
"""


def test_parameters_sharded_over_two_hosts_are_exported_whole(saved, tmp_path):
    out = tmp_path / "out"
    for code, _, error in run_hosts("-c", EXPORT, saved, out, devices=2):
        assert code == 0, error
    ours, theirs = (load_file(d / "model.safetensors") for d in (out, saved))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_no_read_holds_more_than_one_leaf(saved, monkeypatch):
    sizes = []
    read = weights.read_leaf

    def spy(*args):
        sizes.append(read(*args).nbytes)
        return read(*args)

    monkeypatch.setattr(weights, "read_leaf", spy)
    _, params = reference.load(saved)
    assert sorted(sizes) == sorted(x.nbytes for x in jax.tree.leaves(params))


def test_a_block_reads_only_its_rows_of_the_file():
    stored = np.arange(6 * 5).reshape(6, 5)  # 3 heads of 2, width 5
    calls = []

    class Slice:
        def __getitem__(self, index):
            calls.append(index)
            return stored[index]

    whole = stored.reshape(3, 2, 5).transpose(2, 0, 1)
    index = (slice(1, 4), slice(2, 3), slice(None))
    block = weights.read_block(Slice(), whole.shape, ((1, 2), (0,)), index)
    np.testing.assert_array_equal(block, whole[1:4, 2:3])
    assert calls == [(slice(4, 6), slice(1, 4))]


@pytest.mark.fault(17, "tied embeddings")
def test_rotary_buffers_and_a_tied_copy_are_tolerated(tmp_path):
    reference.random_reference("qwen2").save_pretrained(tmp_path)
    _, expected = reference.load(tmp_path)

    def edit(tensors):
        tensors["lm_head.weight"] = tensors[EMBED].copy()
        for name in ("model.rotary_emb", "model.layers.0.self_attn.rotary_emb"):
            tensors[f"{name}.inv_freq"] = np.ones(6, np.float32)

    change(tmp_path, edit)
    _, params = reference.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.fault(17, "tied embeddings")
def test_a_tied_output_matrix_that_differs_is_refused(tmp_path):
    reference.random_reference("qwen2").save_pretrained(tmp_path)
    change(tmp_path, lambda t: t | {"lm_head.weight": t[EMBED] + 1})
    assert re.search(r"lm_head\.weight +differs +tied", refusal(tmp_path))


def test_tied_matrices_that_are_scalars_are_listed_in_the_table(tmp_path):
    reference.random_reference("qwen2").save_pretrained(tmp_path)
    number = np.ones((), np.float32)
    change(tmp_path, lambda t: t | {EMBED: number, "lm_head.weight": number.copy()})
    assert re.search(re.escape(EMBED) + r" +shape .*\[\]", refusal(tmp_path))


@pytest.mark.fault(17, "shape", "dtype", "extra", "one table")
def test_all_problems_are_listed_in_one_table(copy):
    up = "model.layers.{}.mlp.up_proj.weight"

    def edit(tensors):
        del tensors[up.format(0)], tensors["model.norm.weight"]
        tensors[up.format(1)] = np.zeros((3, 4), np.float32)
        tensors["model.layers.9.bias"] = np.zeros(2, np.float32)
        tensors[EMBED] = tensors[EMBED].astype(np.int32)

    change(copy, edit)
    title, header, *rows = refusal(copy).splitlines()
    assert title == f"{copy}: 5 tensors do not fit its config.json"
    assert header.split() == ["tensor", "problem", "expected", "found"]
    assert [re.split(r"\s{2,}", row.strip()) for row in rows] == [
        [EMBED, "dtype", "F32 | BF16 | F16", "I32"],
        [up.format(0), "missing", "[80, 48]", "-"],
        [up.format(1), "shape", "[80, 48]", "[3, 4]"],
        ["model.layers.9.bias", "extra", "-", "[2]"],
        ["model.norm.weight", "missing", "[48]", "-"],
    ]


@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_a_truncated_file_is_named(copy, size):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(copy).startswith(f"{path} is damaged or incomplete")


def test_more_layers_than_tensors_are_refused_before_looking_for_each_tensor(copy):
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000, but there are"):
        huggingface.load_params(copy, read_spec(copy))


def test_a_file_with_another_header_is_named(copy):
    path = copy / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    assert refusal(copy).startswith(f"{path} is damaged or incomplete")


def test_a_git_lfs_pointer_is_recognised(copy):
    path = copy / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refusal(copy)


@pytest.mark.fault(16, "by suffix", "conversion command")
def test_pickles_are_refused_with_a_command_that_converts_them(copy):
    _, expected = reference.load(copy)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    state = {name: torch.tensor(x) for name, x in tensors.items()}
    torch.save(state, copy / "pytorch_model.bin")
    torch.save({}, copy / "optimizer.pt")
    message = refusal(copy)
    assert "pytorch_model.bin" in message and "optimizer.pt" not in message
    python, *args = shlex.split(message.splitlines()[-1])
    assert python == "python"
    subprocess.run([sys.executable, *args], check=True)
    _, params = reference.load(copy)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.fault(16, "under another name")
def test_a_pickle_named_safetensors_is_refused(copy):
    torch.save({"x": torch.ones(2)}, copy / "model.safetensors")
    assert "is a pickle under another name" in refusal(copy)


def test_the_error_for_missing_weights_lists_the_files_that_are_there(copy):
    (copy / "model.safetensors").unlink()
    assert "it has config.json" in refusal(copy)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "..", 7, ""]
)
def test_an_index_may_only_name_files_of_its_directory(copy, name):
    (copy / "model.safetensors").rename(copy.parent / "x.safetensors")
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBED: name}}))
    message = refusal(copy)
    assert str(copy) in message and (
        "not the name of a file" in message or name == ".."
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}'])
def test_an_invalid_index_is_named(copy, text):
    (copy / "model.safetensors").unlink()
    index = copy / "model.safetensors.index.json"
    index.write_text(text)
    assert refusal(copy).startswith(f"{index}: no weight_map")


@pytest.mark.fault(17, "missing shard")
def test_a_missing_shard_is_named(tmp_path):
    reference.random_reference("llama").save_pretrained(
        tmp_path, max_shard_size="100KB"
    )
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert refusal(tmp_path).startswith(f"{shard} is missing")


def test_a_tensor_in_two_shards_is_refused(copy):
    (copy / "model.safetensors").rename(copy / "a.safetensors")
    shutil.copy(copy / "a.safetensors", copy / "b.safetensors")
    weight_map = {EMBED: "a.safetensors", "lm_head.weight": "b.safetensors"}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "b.safetensors" in refusal(copy) and "earlier shard" in refusal(copy)


def test_a_source_that_is_neither_directory_nor_hub_id_is_refused(tmp_path):
    for source in (tmp_path / "nowhere" / "to" / "be", "no such/thing!"):
        with pytest.raises(ValueError, match="neither a local directory nor a Hugging"):
            find_model(str(source))


def test_a_directory_is_its_own_source(tmp_path):
    assert find_model(tmp_path) == tmp_path


def test_an_export_never_overwrites_anything(saved, tmp_path):
    model, params = reference.load(saved)
    held = tmp_path / "held"
    held.mkdir()
    (held / "mine").write_text("x")
    for target in (held, held / "mine"):
        with pytest.raises(ValueError, match="is not overwritten"):
            huggingface.export(target, params, model.spec)
    assert (held / "mine").read_text() == "x"
    empty = tmp_path / "empty"
    empty.mkdir()
    huggingface.export(empty, params, model.spec)
    assert (empty / "model.safetensors").is_file()


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.fault(84, "damaged export")
@pytest.mark.parametrize("max_shard_bytes", [20_000, 60_000, 5_000_000_000])
def test_an_export_is_verified_when_it_is_opened(saved, tmp_path, max_shard_bytes):
    model, params = reference.load(saved)
    out = tmp_path / "out"
    huggingface.export(out, params, model.spec, max_shard_bytes=max_shard_bytes)
    (out / "config.json").write_text((out / "config.json").read_text() + " ")
    jax.tree.map(
        np.testing.assert_array_equal,
        huggingface.load_params(out, model.spec),
        params,
    )
    shard = max(out.glob("*.safetensors"))
    flip(shard)
    with pytest.raises(ValueError, match=rf"{shard.name} .*not as exported"):
        huggingface.load_params(out, model.spec)
    (out / huggingface.DIGESTS).unlink()
    huggingface.load_params(out, model.spec)


@pytest.mark.parametrize("digests", ["[]", "{", '{"../x.safetensors": "0"}', "null"])
def test_an_invalid_file_of_digests_is_refused(saved, tmp_path, digests):
    model, params = reference.load(saved)
    huggingface.export(tmp_path / "out", params, model.spec)
    (tmp_path / "out" / huggingface.DIGESTS).write_text(digests)
    with pytest.raises(ValueError, match=huggingface.DIGESTS):
        huggingface.load_params(tmp_path / "out", model.spec)


def test_a_failed_export_leaves_no_files(saved, tmp_path, monkeypatch):
    model, params = reference.load(saved)

    def fail(*args, **settings):
        raise OSError("disk full")

    monkeypatch.setattr(huggingface, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        huggingface.export(tmp_path / "out", params, model.spec)
    assert list(tmp_path.iterdir()) == []


def test_an_export_includes_the_tokenizer(saved, real_models, tmp_path):
    model, params = reference.load(saved)
    source = real_models / "smollm2-135m-instruct"
    tokenizer = load_tokenizer(source)
    huggingface.export(tmp_path / "out", params, model.spec, tokenizer)
    again = load_tokenizer(tmp_path / "out")
    assert again.fingerprint == tokenizer.fingerprint
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    original = transformers.AutoTokenizer.from_pretrained(source)
    text = "<|im_start|>It's  a\ttest <|im_end|>, naïve \U0001f600"
    assert theirs(text).input_ids == original(text).input_ids
    chat = [{"role": "user", "content": "Who?"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == (
        original.apply_chat_template(chat, tokenize=False)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def small_tokenizer(directory, *, num_tokens=0, **settings):
    """Load a tokenizer of bytes, in which more tokens may be in the vocabulary."""
    tokens = [*SPECIAL, *BYTE_ALPHABET, *map("{:09}".format, range(num_tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    words = Tokenizer(models.BPE(vocab, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(SPECIAL)
    directory.mkdir()
    words.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<end>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


@pytest.mark.parametrize("settings", [{}, {"pad_token": "<pad>"}])
def test_transformers_trains_every_row_of_an_exports_embedding(
    saved, tmp_path, settings
):
    model, params = reference.load(saved)
    tokenizer = small_tokenizer(tmp_path / "words", **settings)
    huggingface.export(tmp_path / "out", params, model.spec, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.get_input_embeddings().padding_idx is None
    generation = theirs.generation_config
    assert generation.pad_token_id == (1 if settings else 0)
    assert theirs.config.eos_token_id == generation.eos_token_id == 0
    assert theirs.config.bos_token_id is generation.bos_token_id is None


def test_transformers_does_not_doubt_the_tokenizer_of_an_export(
    saved, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, params = reference.load(saved)
    tokenizer = small_tokenizer(tmp_path / "words", num_tokens=100_001)
    huggingface.export(tmp_path / "out", params, model.spec, tokenizer)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not caplog.records
