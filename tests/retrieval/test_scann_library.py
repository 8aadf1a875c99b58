"""ScaNN with AVX2 instructions finds as much, independent of the batch."""

import _ctypes
import ctypes
import sys

import numpy as np
import pytest

from rsearch.retrieval import nearest as nearest_module
from rsearch.retrieval.nearest import (
    AVX2,
    AVX2_SWITCH,
    Nearest,
    build_searcher,
    choose_partition,
    enable_avx2,
    import_scann,
    processor_features,
)
from rsearch.retrieval.vectors import Vectors
from tests.retrieval.fakes import measure_recall, unit_rows


@pytest.fixture
def is_used():
    """ScaNN's own variable that enables AVX2; its value is restored afterwards."""
    import_scann()
    variable = ctypes.c_bool.in_dll(ctypes.CDLL(library()), AVX2_SWITCH)
    held = variable.value
    yield variable
    variable.value = held


def library():
    return sys.modules["scann_pybind"].__file__


def processor(tmp_path, monkeypatch, text):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(nearest_module, "PROCESSOR", tmp_path / "cpuinfo")


def test_avx2_is_used_if_the_processor_has_it(is_used):
    assert is_used.value == (processor_features() >= AVX2)


def test_avx2_is_enabled_even_if_scann_is_already_imported(is_used):
    assert "scann" in sys.modules
    is_used.value = False
    import_scann()
    assert is_used.value == (processor_features() >= AVX2)


@pytest.mark.parametrize(
    ("message", "is_right"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx avx2 fma\n\nflags\t\t: fpu\n", True),
        ("flags\t\t: fpu avx fma\n", False),
        ("flags\t\t: avx2\n", False),
        ("vmx flags\t: avx2 fma\n", False),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_avx2_is_enabled_only_on_a_processor_that_has_it(
    is_used, message, is_right, tmp_path, monkeypatch
):
    processor(tmp_path, monkeypatch, message)
    is_used.value = False
    enable_avx2(library())
    assert is_used.value == is_right


def test_an_undescribed_processor_has_no_features(tmp_path, monkeypatch):
    monkeypatch.setattr(nearest_module, "PROCESSOR", tmp_path / "none")
    assert processor_features() == set()


def test_a_library_without_the_variable_is_reported(tmp_path, monkeypatch, capsys):
    processor(tmp_path, monkeypatch, "flags : avx2 fma")
    enable_avx2(_ctypes.__file__)
    assert "scann does not allow AVX2 to be enabled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("quantized", {}),
        ("quantized", {"dims_per_block": 6, "reorder_dtype": "int8"}),
        ("partitioned", {}),
    ],
)
def test_avx2_finds_as_much_in_any_batch(is_used, kind, settings):
    rng = np.random.default_rng(0)
    rows, queries = unit_rows(rng, 3000, 64), unit_rows(rng, 40, 64)
    partition = choose_partition(*rows.shape, kind=kind, **settings)
    nearest = Nearest(Vectors([rows]), build_searcher(rows, partition), partition)
    whole = nearest.search(queries, 10)
    one_by_one = [nearest.search(query[None], 10) for query in queries]
    for part, alone in zip(whole, zip(*one_by_one, strict=True), strict=True):
        np.testing.assert_array_equal(part, np.concatenate(alone))
    with_it = measure_recall(nearest, queries)
    is_used.value = False
    # Other instructions round products differently, and a leaf can depend on that.
    assert abs(measure_recall(nearest, queries) - with_it) <= 0.02
