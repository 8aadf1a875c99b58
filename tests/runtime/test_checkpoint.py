"""A checkpoint is complete and bit-identical, or it is not used."""

import errno
import json
import os
import random
import shutil
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.runtime import checkpoint, files


class Moments(typing.NamedTuple):
    mu: typing.Any
    nu: typing.Any


def make_tree(seed=0):
    """Every kind of leaf and container that a training state has."""
    rng = np.random.default_rng(seed)
    odd = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    odd.view(np.uint32)[0] |= 0x1234  # a NaN with a payload
    return {
        "params": {
            "embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
            "half": jnp.asarray(rng.normal(size=(8, 3)), jnp.bfloat16),
            "odd": jnp.asarray(odd),
        },
        "moments": Moments(mu=[jnp.arange(6, dtype=jnp.int32)], nu=(None, jnp.ones(3))),
        "flags": jnp.array([True, False]),
        "bytes": jnp.arange(5, dtype=jnp.uint8),
        "key": jax.random.key_data(jax.random.key(7)),
        "count": jnp.int32(41),
        "scale": jnp.float32(0.1),
        "empty": jnp.zeros((0, 4)),
        "host": np.arange(3, dtype=np.int32),
    }


def shapes_of(tree):
    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(shape, tree)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def flip_bit(path, position, bit=0):
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, steps 1 and 2, of different trees."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, make_tree(step), {"seen": step * 10}, keep=5)
    return tmp_path


def test_restored_leaves_are_bit_identical(saved):
    tree = make_tree(2)
    restored = checkpoint.restore(saved, 2, shapes_of(tree))
    assert_same_bits(restored, tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_manifest_describes_what_was_saved(saved):
    manifest = checkpoint.read_manifest(saved, 2)
    assert (manifest["schema"], manifest["step"]) == (checkpoint.SCHEMA, 2)
    assert manifest["meta"] == {"seen": 20}
    assert manifest["versions"]["jax"] == jax.__version__
    half = manifest["leaves"]["params.half"]
    assert (half["shape"], half["dtype"]) == ([8, 3], "bfloat16")
    assert len(half["digest"]) == 32


def test_meta_comes_back_as_json_stores_it(tmp_path):
    meta = {"x": 0.1, "nested": {"a": [1, None, True]}, "é": "ü", 3: (4,)}
    checkpoint.save(tmp_path, 0, {"w": jnp.ones(2)}, meta, keep=1)
    actual = checkpoint.read_manifest(tmp_path, 0)["meta"]
    assert actual == {"x": 0.1, "nested": {"a": [1, None, True]}, "é": "ü", "3": [4]}


def test_digest_does_not_depend_on_sharding(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    x = jnp.arange(64.0).reshape(8, 8)
    specs = [PartitionSpec(), PartitionSpec("a", "b"), PartitionSpec(None, ("a", "b"))]
    for step, spec in enumerate(specs):
        tree = {"x": jax.device_put(x, NamedSharding(mesh, spec))}
        checkpoint.save(tmp_path, step, tree, {}, keep=5)
    actual = [checkpoint.read_manifest(tmp_path, s)["leaves"]["x"] for s in range(3)]
    assert actual[0] == actual[1] == actual[2]


@pytest.mark.fault(24, "devices")
def test_a_checkpoint_of_eight_devices_restores_onto_two(tmp_path):
    eight = Mesh(np.array(jax.devices()), ("fsdp",))
    two = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    w = jnp.arange(128.0).reshape(16, 8)
    tree = {
        "w": jax.device_put(w, NamedSharding(eight, PartitionSpec("fsdp"))),
        "n": jax.device_put(jnp.int32(3), NamedSharding(eight, PartitionSpec())),
    }
    checkpoint.save(tmp_path, 0, tree, {}, keep=1)
    sharding = NamedSharding(two, PartitionSpec(None, "tensor"))
    whole = NamedSharding(two, PartitionSpec())
    like = {
        "w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding),
        "n": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    }
    restored = checkpoint.restore(tmp_path, 0, like)
    assert restored["w"].sharding == sharding and restored["n"].sharding == whole
    assert_same_bits(restored, tree)


def test_only_the_newest_are_kept(tmp_path):
    tree = {"w": jnp.ones(3)}
    for step in (3, 7, 20, 100):
        checkpoint.save(tmp_path, step, tree, {}, keep=2)
        assert checkpoint.latest(tmp_path) == step
    assert checkpoint.steps(tmp_path) == [20, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["100", "20"]


def test_no_directory_means_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.newest_good(tmp_path / "nowhere", {}) is None
    with pytest.raises(ValueError, match="no such checkpoint; steps there: none"):
        checkpoint.read_manifest(tmp_path / "nowhere", 1)


def test_an_existing_step_is_not_overwritten(saved):
    with pytest.raises(ValueError, match="a checkpoint of this step already"):
        checkpoint.save(saved, 2, make_tree(3), {}, keep=5)
    assert_same_bits(checkpoint.restore(saved, 2, make_tree(0)), make_tree(2))


def test_torn_save_is_ignored_and_replaced(saved):
    (saved / "2" / "manifest.json").unlink()
    assert checkpoint.latest(saved) == 1
    checkpoint.save(saved, 2, make_tree(9), {}, keep=5)
    assert_same_bits(checkpoint.restore(saved, 2, make_tree(0)), make_tree(9))


def test_torn_saves_older_than_a_new_checkpoint_are_deleted(saved):
    (saved / "1" / "manifest.json").unlink()
    checkpoint.save(saved, 3, make_tree(3), {}, keep=5)
    assert sorted(p.name for p in saved.iterdir()) == ["2", "3"]


def all_files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.fault(23, "clock backwards")
@pytest.mark.fault(48, "clock skew")
def test_the_newest_checkpoint_has_the_highest_step_whatever_the_clock_said(saved):
    for path in [saved / "2", *(saved / "2").rglob("*")]:
        os.utime(path, (0, 0))
    assert checkpoint.latest(saved) == 2
    checkpoint.save(saved, 3, make_tree(3), {}, keep=2)
    assert checkpoint.steps(saved) == [2, 3]


@pytest.mark.fault(19, "flipped bit")
def test_one_flipped_bit_in_any_file_is_found_and_the_file_named(saved):
    like = make_tree(0)
    rng = random.Random(0)
    for path in all_files(saved / "2"):
        size = path.stat().st_size
        for position in {0, size // 2, size - 1, rng.randrange(size)}:
            bit = rng.randrange(8)
            flip_bit(path, position, bit)
            with pytest.raises(checkpoint.DamagedError) as caught:
                checkpoint.restore(saved, 2, like)
            assert str(path) in str(caught.value)
            flip_bit(path, position, bit)
    assert_same_bits(checkpoint.restore(saved, 2, like), make_tree(2))


@pytest.mark.fault(19, "flipped bit")
def test_every_flipped_bit_of_the_manifest_is_found(tmp_path):
    checkpoint.save(tmp_path, 5, {"w": jnp.ones(2)}, {"a": 1}, keep=1)
    path = tmp_path / "5" / "manifest.json"
    for position in range(path.stat().st_size):
        for bit in (0, 3, 5, 7):
            flip_bit(path, position, bit)
            with pytest.raises(checkpoint.DamagedError, match=r"manifest\.json"):
                checkpoint.read_manifest(tmp_path, 5)
            flip_bit(path, position, bit)
    checkpoint.read_manifest(tmp_path, 5)


@pytest.mark.fault(19, "truncated", "deleted")
def test_truncated_and_missing_files_are_found_and_named(saved):
    like = make_tree(0)
    for path in all_files(saved / "2"):
        raw = path.read_bytes()
        for size in {0, len(raw) // 2, len(raw) - 1}:
            path.write_bytes(raw[:size])
            with pytest.raises(checkpoint.DamagedError, match=path.name):
                checkpoint.restore(saved, 2, like)
        path.write_bytes(raw)
        if path.name != "manifest.json":
            path.unlink()
            with pytest.raises(checkpoint.DamagedError, match="file is missing"):
                checkpoint.restore(saved, 2, like)
            path.write_bytes(raw)


@pytest.mark.fault(19, "swapped")
def test_data_that_differs_although_file_digests_match_is_named_by_leaf(saved):
    """The data that reached the disk differs from the data in memory."""
    body = checkpoint.read_manifest(saved, 2)
    right = body["leaves"]["params.half"]["digest"]
    body["leaves"]["params.half"]["digest"] = "0" * 32
    (saved / "2" / "manifest.json").write_bytes(checkpoint.encode(body))
    with pytest.raises(checkpoint.DamagedError) as caught:
        checkpoint.restore(saved, 2, make_tree(0))
    for part in ("leaf params.half", right, "0" * 32):
        assert part in str(caught.value)


@pytest.mark.fault(19, "previous one used", "set aside")
def test_a_damaged_step_is_set_aside_and_the_previous_one_is_used(saved, capsys):
    victim = max(all_files(saved / "2" / "tree"), key=lambda p: p.stat().st_size)
    flip_bit(victim, victim.stat().st_size // 2)
    damaged = victim.read_bytes()
    step, tree, meta = checkpoint.newest_good(saved, make_tree(0))
    assert (step, meta) == (1, {"seen": 10})
    assert_same_bits(tree, make_tree(1))
    message = capsys.readouterr().err
    assert victim.name in message and "set aside as 2.damaged" in message
    moved = saved / "2.damaged" / victim.relative_to(saved / "2")
    assert moved.read_bytes() == damaged
    assert checkpoint.steps(saved) == [1]
    # The step can be saved and be damaged again; nothing set aside is ever lost.
    checkpoint.save(saved, 2, make_tree(2), {}, keep=1)
    assert checkpoint.set_aside(saved, 2).name == "2.damaged.2"
    assert moved.exists()


@pytest.mark.fault(23, "hosts disagree")
@pytest.mark.parametrize("mine", [[1, 2], [1]], ids=["this host sees more", "less"])
def test_hosts_continue_from_the_latest_step_that_all_of_them_see(
    saved, monkeypatch, capsys, mine
):
    other = [1] if mine == [1, 2] else [1, 2]

    def exchange(own):  # with a host that sees other steps, and no damage
        return [own, json.dumps(other).encode() if own.startswith(b"[") else own]

    monkeypatch.setattr(checkpoint.processes, "allgather_bytes", exchange)
    monkeypatch.setattr(checkpoint, "steps", lambda _: mine)
    step, tree, _ = checkpoint.newest_good(saved, make_tree(0))
    assert step == 1
    assert_same_bits(tree, make_tree(1))
    number = 1 if mine == [1, 2] else 0
    message = capsys.readouterr().err
    assert f"2: not seen by hosts [{number}]; continuing from 1" in message
    assert (saved / "2.damaged" / "manifest.json").exists()


@pytest.mark.fault(23, "hosts disagree")
def test_hosts_that_have_no_checkpoint_in_common_do_not_start_over(saved, monkeypatch):
    def other_sees_none(payload):
        return [payload, b"[]"]

    monkeypatch.setattr(checkpoint.processes, "allgather_bytes", other_sees_none)
    with pytest.raises(ValueError, match="no checkpoint is seen by all hosts"):
        checkpoint.newest_good(saved, make_tree(0))
    assert checkpoint.steps(saved) == [1, 2]


def test_if_all_checkpoints_are_damaged_a_run_does_not_start_over(saved):
    for step in (1, 2):
        (saved / str(step) / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        checkpoint.newest_good(saved, make_tree(0))
    assert sorted(p.name for p in saved.iterdir()) == ["1.damaged", "2.damaged"]


def delete_when_read(monkeypatch, folder, then=lambda: None):
    """Have a run delete a step, and call `then`, while a reader verifies its files."""
    digest_file = files.digest_file

    def digest(path):
        if folder in path.parents:
            checkpoint.delete_step(folder)
            then()
        return digest_file(path)

    monkeypatch.setattr(files, "digest_file", digest)


def test_a_reader_passes_to_the_step_that_replaces_the_one_it_reads(saved, monkeypatch):
    def save():
        checkpoint.save(saved, 3, make_tree(3), {}, keep=1)

    delete_when_read(monkeypatch, saved / "2", then=save)
    step, tree = checkpoint.newest_readable(saved, make_tree(0))
    assert step == 3
    assert_same_bits(tree, make_tree(3))
    assert checkpoint.newest_readable(saved / "none", make_tree(0)) is None


def test_a_reader_reports_what_does_not_fit(saved):
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.newest_readable(saved, {})
    assert checkpoint.steps(saved) == [1, 2]


@pytest.mark.fault(22, "newer schema", "older schema")
@pytest.mark.parametrize("schema", [checkpoint.SCHEMA + 1, checkpoint.SCHEMA - 1])
def test_another_schema_is_refused_and_left_alone(saved, schema):
    body = {**checkpoint.read_manifest(saved, 2), "schema": schema}
    (saved / "2" / "manifest.json").write_bytes(checkpoint.encode(body))
    message = f"2/manifest.json: schema {schema}, but this program reads schema 1"
    with pytest.raises(ValueError, match=message):
        checkpoint.newest_good(saved, make_tree(0))
    assert checkpoint.steps(saved) == [1, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("count"), "count is only in the checkpoint"),
        (lambda t: t.update(new=jnp.ones(1)), "new is not in the checkpoint"),
        (
            lambda t: t["params"].update(embed=jnp.ones((16, 9))),
            "params.embed is float32[16, 8] in the checkpoint, here float32[16, 9]",
        ),
        (
            lambda t: t["params"].update(half=jnp.ones((8, 3), jnp.float16)),
            "params.half is bfloat16[8, 3] in the checkpoint, here float16[8, 3]",
        ),
    ],
)
def test_a_different_structure_is_refused_by_leaf_and_is_not_damage(
    saved, change, message
):
    like = make_tree(0)
    change(like)
    with pytest.raises(ValueError) as caught:
        checkpoint.newest_good(saved, like)
    assert message in str(caught.value)
    assert not isinstance(caught.value, checkpoint.DamagedError)
    assert checkpoint.steps(saved) == [1, 2]


@pytest.mark.parametrize(
    "leaf, message",
    [
        (3, "leaf a.0 is of type int, not an array"),
        (jax.random.key(0), "save jax.random.key_data"),
        (np.arange(3), "dtype int64, but JAX uses 32 bits"),
        (np.array(["x"]), "which JAX lacks"),
    ],
)
def test_a_leaf_that_could_not_be_restored_is_refused(tmp_path, leaf, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path, 0, {"a": [leaf]}, {}, keep=1)
    assert not any(tmp_path.iterdir())


def test_leaves_that_share_a_name_are_refused(tmp_path):
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    with pytest.raises(ValueError, match="same dotted name"):
        checkpoint.save(tmp_path, 0, tree, {}, keep=1)


@pytest.mark.fault(21, "older checkpoints intact")
def test_a_failed_write_leaves_the_older_checkpoints_in_use(saved, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(checkpoint.files, "replace", full)
    with pytest.raises(OSError):
        checkpoint.save(saved, 3, make_tree(3), {}, keep=1)
    assert checkpoint.steps(saved) == [1, 2]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("RESOURCE_EXHAUSTED: ...: No space left on device [28]", errno.ENOSPC),
        ('NOT_FOUND: Error writing "x/0.0" in OCDBT database', errno.EIO),
    ],
)
def test_an_error_of_tensorstore_is_raised_as_a_disk_error(
    saved, monkeypatch, words, code
):
    class Refusing:
        def __init__(self, *_):
            raise ValueError(words)

    monkeypatch.setattr(ocp, "Checkpointer", Refusing)
    with pytest.raises(OSError) as caught:
        checkpoint.save(saved, 3, make_tree(3), {}, keep=1)
    assert caught.value.errno == code


def test_ten_megabytes_are_saved_within_a_second(tmp_path):
    rng = np.random.default_rng(0)
    tree = {
        f"l{i}": jnp.asarray(rng.normal(size=(256, 128)), jnp.float32)
        for i in range(80)
    }
    seconds = []
    for step in range(4):
        start = time.perf_counter()
        checkpoint.save(tmp_path, step, tree, {}, keep=1)
        seconds.append(time.perf_counter() - start)
    # 0.15 s on two idle cores; the bound leaves room for busy ones.
    assert min(seconds) < 1.0


def test_moved_checkpoint_restores(saved, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved") / "ckpt"
    shutil.copytree(saved, moved)
    shutil.rmtree(saved / "2")
    assert_same_bits(checkpoint.restore(moved, 2, make_tree(0)), make_tree(2))


def test_manifest_is_plain_json(saved):
    text = (saved / "2" / "manifest.json").read_text()
    assert json.loads(text)["leaves"]["count"]["shape"] == []


@pytest.mark.fault(83, "checkpoint of another run", "of another stage")
@pytest.mark.parametrize(
    "field, other", [("run", "beef"), ("stage", "sft")], ids=["run", "stage"]
)
def test_a_checkpoint_of_another_run_or_stage_is_refused(tmp_path, field, other):
    made_by = {"run": "cafe", "stage": "rl", "config": {"seed": 1}}
    tree = make_tree(1)
    checkpoint.save(tmp_path, 1, tree, {}, keep=2, made_by={**made_by, field: other})
    assert checkpoint.read_manifest(tmp_path, 1)["made_by"]["config"] == {"seed": 1}
    with pytest.raises(ValueError, match=f"{other}.*{made_by[field]}"):
        checkpoint.newest_good(tmp_path, shapes_of(tree), made_by=made_by)
    assert checkpoint.steps(tmp_path) == [1]  # neither deleted nor set aside


def test_a_checkpoint_of_an_earlier_version_is_accepted_by_any_run(tmp_path):
    tree = make_tree(1)
    checkpoint.save(tmp_path, 1, tree, {}, keep=2)
    made_by = {"run": "cafe", "stage": "rl"}
    assert checkpoint.newest_good(tmp_path, shapes_of(tree), made_by=made_by)[0] == 1
