"""Compiled programs are kept below the cache, within a size limit."""

import math
import os
import shutil
import subprocess
import sys

import jax
import pytest

from rsearch.runtime.programs import keep_programs, make_room

FOLDER = "jax_compilation_cache_dir"


@pytest.fixture
def no_folder(monkeypatch):
    """Unset the directory of programs, and restore JAX's settings afterwards."""
    seconds = "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in (FOLDER, seconds)}
    jax.config.update(FOLDER, None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_below_the_cache(no_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("RSEARCH_CACHE", str(tmp_path))
    keep_programs()
    folder = jax.config.jax_compilation_cache_dir
    assert os.path.dirname(folder) == str(tmp_path / "programs")
    assert os.path.isdir(folder)


def test_on_a_full_disk_programs_are_only_read(no_folder, monkeypatch, tmp_path):
    """JAX would leave half a program there, and never write it again."""
    monkeypatch.setenv("RSEARCH_CACHE", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is not None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == math.inf


def test_a_second_process_compiles_nothing(tmp_path):
    code = (
        "import jax, rsearch.runtime.programs as p\n"
        "events = []\n"
        "listen = jax.monitoring.register_event_listener\n"
        "listen(lambda name, **_: events.append(name))\n"
        "p.keep_programs()\n"
        "jax.jit(lambda x: 2 * x)(3.0)\n"
        "print(sum(name.endswith('cache_misses') for name in events))"
    )
    ours = ("JAX_", "RSEARCH_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {"RSEARCH_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    misses = [
        int(subprocess.check_output([sys.executable, "-c", code], env=environment))
        for _ in range(2)
    ]
    assert misses[0] > 0 == misses[1]


def test_a_directory_that_the_user_sets_is_kept(no_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("RSEARCH_CACHE", str(tmp_path / "cache"))
    jax.config.update(FOLDER, str(tmp_path / "named"))
    keep_programs()
    assert str(tmp_path / "named") == jax.config.jax_compilation_cache_dir


@pytest.mark.parametrize("cache", ["file", "~nobody-of-this-name/cache"])
def test_an_unusable_cache_is_no_error(no_folder, monkeypatch, tmp_path, cache):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RSEARCH_CACHE", cache)
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize(
    ("max_bytes", "remaining"), [(40, "abcd"), (39, "d"), (20, "d"), (19, "")]
)
def test_the_oldest_programs_are_deleted_first(tmp_path, max_bytes, remaining):
    for seconds, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (seconds, seconds))
    make_room(tmp_path, max_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(remaining)
