"""Many concurrent OpenAI clients, every other one of which streams."""

import pytest

from rsearch import export
from rsearch.config.recipes import run_command
from tests.chaos import clients
from tests.small_run import finished


@pytest.mark.slow
def test_many_clients_are_answered_without_an_error(tmp_path, capsys):
    out = tmp_path / "model"
    assert run_command(export.main, [f"--workdir={finished()}", f"--out={out}"]) == 0
    argv = [f"--model={out}", "--clients=64", "--seconds=5"]
    assert clients.main(argv) == 0
    assert "answers a second" in capsys.readouterr().out
