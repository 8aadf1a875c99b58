"""A table of what can go wrong, and the tests that show how each fault is handled.

    pytest -m fault                     runs these tests
    python -m tests.test_faults         lists them by row and item

A test names the items of a row that it shows: `@pytest.mark.fault(9, "invalid UTF-8")`.
An item without a test has a line with the reason in faults_left_out.md.
"""

import ast
import collections
import functools
import pathlib
import re
import sys

import pytest

from rsearch.config.recipes import parse_flags, run_command

FOLDER = pathlib.Path(__file__).resolve().parent
LEFT_OUT = FOLDER / "faults_left_out.md"
KNOWN = FOLDER.parent.parent / "shared" / "faults.md"

FAULTS = """
1 a misspelt field: nearest name; exit 2 in one line; any single edit
2 a misspelt flag: misspelt --config; unknown flag; exit 2
3 a number out of range: negative steps; NaN; group of one; clip of 0
4 sizes that do not fit: batch; mesh; context; arithmetic shown
5 a field that is None: set from the command line
6 a recipe: missing; syntax error; error while it runs
7 runs that collide: conflicting overrides; trial twice; one workdir; stale lock
8 a changed configuration: table; safe fields; accepted by name
9 a line of questions or passages: truncated; invalid UTF-8; NaN literal;
  duplicate keys; nested deep; wrong type; on_bad=skip
10 a data file: empty; byte order mark; CRLF; truncated gzip; no golden answer;
  golden answer of nothing; NFC and NFD; full-width digits; right to left
11 a question that is too long: left out and listed; never cut
12 duplicate questions: duplicate ids; in train and dev; decontaminate
13 a group without spread: zero gradient; KL rule; counted
14 nothing to train on: no trained token; all-masked row; no reward on padding
15 a data set between save and resume: changed; shortened; reordered; both fingerprints
16 weights in a pickle: by suffix; under another name; conversion command
17 weights that do not fit: missing shard; shape; dtype; tied embeddings; extra;
  one table
18 a tokenizer: vocabulary and embedding; no end of text; no padding token;
  no chat template; chat template that raises
19 a damaged checkpoint: flipped bit; truncated; deleted; swapped; previous one used;
  set aside
20 SIGKILL: in a save; in a rename; in a deletion; in a journal's append
21 a disk that refuses writes: full; read-only; quota; permission denied; file in the
  way; storage service; older checkpoints intact; retried
22 a checkpoint of another version: newer schema; older schema
23 which step is the latest: clock backwards; hosts disagree
24 another topology: devices; hosts; what must divide
25 contents of a turn: unclosed search; nested tags; two actions; empty query;
  fifty queries; invalid JSON; JSON with NaN; cut by the limit; split over tokens;
  look-alikes
26 observations that the policy writes: format penalty; no retrieval; inside the mask
27 control ids that the policy samples: text in decoding; rule of the episode
28 the end of a turn: answer and search; end of text; turns used up; cut observation;
  mask by token
29 logits that are not finite: step aborted; parameter named
30 an unavailable search service: at the start; bounded wait; tool_error; out of the
  loss; saved if it lasts
31 a reply of the wrong shape: fewer rows; no contents; contents no text; HTML; huge;
  gzip bomb; logged
32 a network fault: Retry-After in seconds; Retry-After as a date; 5xx; reset;
  half-open; slow bytes; unknown host; TLS
33 results of a search: duplicates; NaN score; ScaNN's padding; FAISS's padding;
  more than there are; none asked for; empty corpus; blank query; unknown words;
  zero score
34 an index that does not match: encoder; width; corpus; moved; damaged
35 an encoder slower than the rollouts: bounded queue
36 a tool that never returns: call to a service; call within the process
37 hostile documents: same rewards and actions; no control id; told in the report
38 a judge that fails: unreachable; prose; wrong count; NaN; retried; excluded
39 answers that hack the reward: empty; a choice; among many words; a whole document
40 signals: SIGTERM; SIGINT twice; SIGUSR1; SIGHUP; every stage
41 a lost process: killed; stopped; slow
42 resources used up: device memory; killed for memory; file descriptors; shared memory;
  full log
43 hosts that differ: versions; configuration and inputs
44 a port in use: of a service; of the coordinator
45 variables of an earlier job: SLURM; MEGASCALE
46 a compilation longer than the heartbeat: goes on beating
47 a tracker: failing; hanging
48 names and times: clock skew; non-ASCII and spaces; bucket; symlink;
  long; signs of patterns
49 a service under fuzz: strangers; body; numbers; many at once; client gone; SIGTERM
50 MCP: unknown tool; argument types; stdout
60 golden answers of public files: aliases in thirty layouts; aliases not known;
  questions without an answer; id under another name; predictions
61 a list of answers as text: JSON; Python; array; text in brackets; no list of texts;
  Parquet columns
62 an answer that normalises to nothing: articles; punctuation alone
63 one bad record of millions: a title or a text alone; public layouts; blank last
  lines; on_bad=skip of a corpus; demonstrations
64 files of other systems and programs: CRLF inside contents; few-shot prompt;
  intermediate_data.json; save_to_disk
65 a small file of gigabytes: gzip checked while it is unpacked; gzip of questions;
  Parquet of gigabytes
66 paths chosen by others: corpus path that leads elsewhere; temporary files
  through no link
67 tokens beside tokenizer.json: families; added_tokens_decoder; older files; settings;
  unknown field; end-of-turn ids; template list without a default
68 an encoder's declaration: declared pooling; declared prompts; layouts; what is not
  computed; prompts that differ
69 features of chat templates: generation blocks; thoughts of earlier turns; contents
  rewritten; helpers of templates
70 programs and patterns of others: endless template; number format of a billion;
  pattern that backtracks; long passages cut before they are encoded
71 another tool's checkpoint: FSDP and verl; PEFT; DeepSpeed; Megatron; distcp; GGUF;
  TensorFlow, Flax, ONNX; git-lfs pointers; partial downloads; folders; quantised
  weights; pickled shards
72 the identity of models: every byte; no second read; damaged cache; an older run;
  every directory; configuration and template
73 absurd numbers from a service: score; lengths; dates; anything that is raised
74 replies of a judge, writer or reader: thought left out; unclosed thought; nothing
  left; empty text; refusal; counted; local model
75 a reply of the wrong type: text for a list; object for a list; null id; missing
  score; score of another type
76 an element of a batch: malformed hit; malformed row; long passage; same bounds;
  question too long; no outage
77 a model other than the policy: refused at the start; transient at the start; first
  characters; masked; outage; mean over nothing
78 proxy and certificate variables: proxy; certificate; hub id
79 where a key goes: proxy to loopback; plain http; key in a path
80 addresses of pages: table of networks; embedded addresses
81 long runs of combining marks: same form; linear time; words of a passage
82 a directory that is lost: moved; deleted; replaced; unmounted; moved in a save; next
  save; exit code; at random instants; two paths to it; symbolic link; bind mount; lock
  file deleted; lock file made again; network disk away
83 the provenance of a result: checkpoint of another run; of another stage; code; user
  function; library; variable; device; held-out questions; strict; recorded; verified
84 damage by a crash, a disk or a power cut: rows durable before the checkpoint; gap
  in the rows; damaged row; damaged journal record; later good records; damaged wave of
  rollouts; fsynced before their rename; damaged export; damaged offsets of a corpus
85 the ports of several hosts: address; host twice; stranger's connection; replayed
  token; proxy
86 the shell around a run: no home; unwritable cache; full disk; home in a path; colon
  in a config path; encoding of the output; closed streams; path of no encoding; python
  without asserts; umask
87 text of other people's runs: control characters; Markdown
88 one of our files with absurd content: results; configuration; record of a sweep;
  metrics; transcripts; manifest; undone rows; memory; journal; directory in its place
89 an interrupt while a run starts: imports; loading; first step; after the run;
  handlers are exchanged
90 a service under load: idle connections; slow bodies; bounded connections; fewer than
  the descriptors; the body comes first; health; capped replies; SIGTERM; an answer that
  takes too long
91 the wire of public clients: public clients; replies without scores; no queries; many
  queries; many passages; long queries; queries of a single text; named routes; reasons
  in the status line; only what searching needs; passages as the client shows them
92 numbers of the public functions: answers of nothing in R-Search; FlashRAG's F1; an
  empty golden answer as a substring; cap of k3
"""


@functools.cache
def table():
    """Return FAULTS as {row: (title, [items])}."""
    lines = re.sub(r"\n +", " ", FAULTS.strip()).splitlines()
    actual = {}
    for line in lines:
        row, title, items = re.fullmatch(r"(\d+) ([^:]+): (.+)", line).groups()
        assert int(row) not in actual, line
        actual[int(row)] = title, items.split("; ")
    return actual


@functools.cache
def marks():
    """Return [(row, item, file, test)] of the tests' markers, without imports."""
    actual = []
    for path in sorted(FOLDER.rglob("test_*.py")):
        name = path.relative_to(FOLDER).as_posix()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            for call in getattr(node, "decorator_list", []):
                is_call = isinstance(call, ast.Call)
                if is_call and ast.unparse(call.func) == "pytest.mark.fault":
                    assert node.name.startswith("test_"), f"{name}: {node.name}"
                    row, *items = map(ast.literal_eval, call.args)
                    assert items, f"{name}: {node.name}: row {row} without an item"
                    actual += [(row, item, name, node.name) for item in items]
    return actual


def left_out():
    """Return faults_left_out.md as {(row, item): reason}."""
    actual = {}
    for line in LEFT_OUT.read_text().splitlines():
        if not line.startswith("- "):
            continue
        row, items, why = re.fullmatch(r"- (\d+) ([^:]+): (.+\.)", line).groups()
        for item in items.split("; "):
            assert (int(row), item) not in actual, line
            actual[int(row), item] = why
    return actual


def all_items():
    return {(row, item) for row, (_, items) in table().items() for item in items}


def test_every_item_has_a_test_or_a_reason():
    covered = {(row, item) for row, item, *_ in marks()} | left_out().keys()
    assert not sorted(all_items() - covered)


def test_every_marker_and_reason_names_an_item():
    named = {(row, item) for row, item, *_ in marks()} | left_out().keys()
    assert not sorted(named - all_items())


def test_no_item_is_both_shown_and_left_out():
    assert not sorted({(row, item) for row, item, *_ in marks()} & left_out().keys())


def test_an_item_appears_once_in_its_row():
    for row, (_, items) in table().items():
        twice = [i for i, n in collections.Counter(items).items() if n > 1]
        assert not twice, f"row {row}: {twice}"


def test_the_rows_are_those_of_the_list_next_to_the_checkout():
    if not KNOWN.is_file():
        pytest.skip("the list of the rows is not next to this checkout")
    numbers = map(int, re.findall(r"(?<!\S)(\d+)\. ", KNOWN.read_text()))
    assert set(table()) == {n for n in numbers if 0 < n < 100}


def main(argv):
    """Print each row with its items and the tests that show them."""
    parse_flags(argv, flags={})
    shown = collections.defaultdict(list)
    for row, item, file, name in marks():
        shown[row, item].append(f"{file}::{name}")
    for row, (title, items) in table().items():
        print(f"{row} {title}")
        for item in items:
            print(f"  {item}")
            told = shown[row, item] or [f"left out: {left_out().get((row, item), '?')}"]
            print("\n".join(f"    {line}" for line in told))


if __name__ == "__main__":
    sys.exit(run_command(main))
