"""Every command that a document names is executed by a test."""

import re

from tests import test_document_commands, test_documents, test_world_commands
from tests.document_commands import COMMANDS_OF_DOCUMENTS, needs_only_a_run, words_of
from tests.extension import test_examples
from tests.small_run import ROOT

# Files whose tests execute commands of these patterns with arguments of their own.
BY_OTHER_FILES = {
    r"launch/(quickstart|gpu_plan)\.sh": "test_launch.py",
    r"rsearch\.bench (rollout|train|step|growth)": "test_bench.py",
    r"rsearch\.bench retrieval": "bench/test_retrieval.py",
    r"rsearch\.replay": "test_replay.py",
    r"rsearch\.tables .*--runs=": "test_tables.py",
    r"rsearch\.tables .*--topology=": "plan/test_table_runs.py",
    r"tests\.chaos\.clients": "serving/test_clients.py",
    r"tests\.chaos\.files": "chaos/test_files.py",
    r"tests\.chaos\.injections": "chaos/test_injections.py",
    r"tests\.chaos\.resume": "chaos/test_resume.py",
    r"tests\.chaos\.retriever": "chaos/test_retriever.py",
    r"tests\.chaos\.stops": "chaos/test_stops.py",
}
NEED_NO_ARGUMENTS = ("tests.", "rsearch.fidelity")
# Any other command without its arguments, or with a placeholder, is only a name.
PLACEHOLDER = re.compile(r"[= ]\.\.\.(\s|$)|RUN --step=N|=DIR,DIR")


def executed():
    """Return the text of each command that a test of these modules executes."""
    commands = [
        *test_documents.NEED_NO_MODEL,
        *test_documents.READ_RECIPES,
        *filter(needs_only_a_run, COMMANDS_OF_DOCUMENTS),
        *test_document_commands.EXECUTED,
        *test_world_commands.SINGLE,
        *test_world_commands.SERVING,
    ]
    blocks = [
        *test_world_commands.BLOCKS,
        *test_document_commands.EXAMPLES,
        *test_examples.BLOCKS,
    ]
    return {command.text for command in commands} | {*map(" ".join, words_of(blocks))}


def test_every_command_of_a_document_is_executed_by_a_test():
    texts = {
        command.text
        for command in COMMANDS_OF_DOCUMENTS
        if command.arguments or command.name.startswith(NEED_NO_ARGUMENTS)
        if not PLACEHOLDER.search(command.text)
    }
    for pattern, file in BY_OTHER_FILES.items():
        assert (ROOT / "tests" / file).is_file()
        matching = {text for text in texts if re.search(pattern, text)}
        assert matching, pattern
        texts -= matching
    assert not sorted(texts - executed())
