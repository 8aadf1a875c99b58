"""Fixtures shared by all tests: eight fake devices, and real models if available."""

import os

from tests.session import SESSION_FOLDER, make_session_folder
from tests.xla import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", xla_flags(8))
# The first process of a session makes the folder and deletes it at its end.
_session_folder = None if SESSION_FOLDER in os.environ else make_session_folder()

import pathlib
import subprocess

import hypothesis
import jax
import pytest

from rsearch.runtime.files import locked

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

jax.config.update("jax_numpy_rank_promotion", "raise")
# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real questions and passages; skips if there is none."""
    if not (SHARED / "data").is_dir():
        pytest.skip("there is no real data next to this checkout")
    return SHARED / "data"


@pytest.fixture(scope="session")
def real_models():
    """The folder of smollm2-135m-instruct/ and minilm/; skips if it cannot be made."""
    out = pathlib.Path(
        os.environ.get("RSEARCH_TEST_MODELS", ROOT / "build" / "test_models")
    )
    files = [
        out / name / "model.safetensors" for name in ("smollm2-135m-instruct", "minilm")
    ]
    if all(file.is_file() for file in files):
        return out
    script = SHARED / "tools" / "make_models.sh"
    if not script.is_file():
        pytest.skip("there are neither real models nor the script that makes them")
    out.mkdir(parents=True, exist_ok=True)
    # The workers of a session may get here at the same time. The script does nothing if
    # another worker has made the models by then.
    with locked(out / "lock", waits=True):
        subprocess.run(["bash", str(script), str(out)], check=True, timeout=600)
    return out
