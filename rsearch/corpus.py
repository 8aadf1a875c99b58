"""Write a corpus from public data: python -m rsearch.corpus FILE... --out=corpus.jsonl

    python -m rsearch.corpus psgs_w100.tsv --out=corpus.jsonl
    python -m rsearch.corpus kilt_knowledgesource.json --words=100 --out=corpus.jsonl
    python -m rsearch.corpus wiki.jsonl news.jsonl --prefixes=wiki-,news- --out=...
    python -m rsearch.corpus world:configs/quickstart.py --out=world.jsonl

A FILE, plain or gzip, is a table such as DPR's or KILT's, JSON Lines or a JSON list of
{id, contents} or, as in BEIR's corpus.jsonl, {_id, title, text}, a Parquet file, or a
dataset on the hub. With --words each record is an article, such as a page of Wikipedia
or KILT, and is cut into passages of that many words; the last passage may be shorter. A
passage's id is the article's id, "-" and a number from 0; an article without an id uses
its title as the id. Two passages with the same id are an error; --prefixes keeps the
ids of several corpora distinct. world:RECIPE, which must be the only FILE, stands for
the passages of the embedded world that the recipe's questions are about.

The output has one line {"id", "contents"} for each passage; the first line of the
contents is the title. An existing file is never overwritten.
"""

import os
import sys
import time
from collections.abc import Sequence

from rsearch.config.recipes import REQUIRED, load, parse_flags, run_command
from rsearch.data.corpus_sources import corpus_line, write_corpus
from rsearch.data.records import report_skipped
from rsearch.runtime.console import note, table
from rsearch.runtime.files import check_output, replacing
from rsearch.world.world import make_world

WORLD_PREFIX = "world:"
FLAGS = {
    "out": (REQUIRED, "the output file, which must not exist yet"),
    "words": (0, "words in a passage cut from an article; 0 = records are passages", 0),
    "prefixes": ("", "a prefix for the ids of each FILE, separated by commas"),
    "on_bad": ("raise", "bad records are an error; skip leaves out and counts them"),
}


def main(argv: Sequence[str]) -> int:
    """Read the arguments, write the corpus and print a summary of it."""
    start_time = time.monotonic()
    flags = parse_flags(argv, flags=FLAGS, positional=("FILE...",))
    sources, out = flags["FILE"], flags["out"]
    prefixes = flags["prefixes"].split(",") if flags["prefixes"] else []
    if prefixes and len(prefixes) != len(sources):
        raise ValueError(
            f"--prefixes={flags['prefixes']}: {len(prefixes)} for {len(sources)} files"
        )
    check_output("out", out)
    if os.path.lexists(out):
        raise ValueError(f"--out={out} exists already and is not overwritten")
    if out.endswith(".gz"):
        raise ValueError(f"--out={out}: the output is not compressed; drop the .gz")
    worlds = [source for source in sources if source.startswith(WORLD_PREFIX)]
    if worlds:
        if len(sources) > 1 or prefixes or flags["words"]:
            raise ValueError(
                f"{worlds[0]}: must be the only FILE, without --prefixes and --words"
            )
        num, skipped = _write_world(worlds[0].removeprefix(WORLD_PREFIX), out), None
    else:
        num, skipped = write_corpus(
            sources,
            out,
            words=flags["words"],
            prefixes=prefixes,
            on_bad=flags["on_bad"],
        )
    rows = [("passages", str(num))]
    if skipped is not None:
        report_skipped(", ".join(sources), skipped.problems, note, count=skipped.num)
        rows.append(("bad records left out", str(skipped.num)))
    rows.append(("seconds", f"{time.monotonic() - start_time:.1f}"))
    table(f"Corpus {out}", ("", "value"), rows)
    return 0


def _write_world(recipe: str, out: str) -> int:
    """Write the passages of a recipe's world and return their number."""
    c = load(recipe)
    passages = make_world(seed=c.seed, **c.world).passages
    with replacing(out, overwrites=False) as file:
        for passage in passages:
            file.write(corpus_line(passage.id, passage.contents))
    return len(passages)


if __name__ == "__main__":
    sys.exit(run_command(main))
