"""Check the machine on which a run starts, before anything is loaded."""

import os
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

from rsearch.config.stage_plan import ROLES, URLS, WORLD, kinds, roles_of, stage_configs
from rsearch.rewards.group import needs_judge
from rsearch.runtime import connections
from rsearch.world.pretrained import models_directory

MIN_FREE_BYTES = 1 << 20  # even a run without checkpoints writes this much


def check_machine(
    config: ConfigDict,
    *,
    home: str | os.PathLike | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Refuse proxies, certificates, a cache or a disk that the run could not use.

    Args:
        config: the run's configuration; sources named by later stages are checked too.
        home: the run's directory, which need not exist yet.
        log: called with a line about a variable that is set but not read.

    Raises:
        ValueError: names the variable and its value, or the directory.
    """
    sources = {}
    # Without overrides the stages name no other sources, and copying them is slow.
    stages = stage_configs(config) if config.overrides else ()
    for c in (config, *(stage_config for _, stage_config in stages)):
        sources |= {(field, source): None for field, source in _sources(c).items()}
    warnings = {}
    for field, source in sources:
        connections.check_source(source, f"config.{field}")
        if source.startswith(URLS):
            warnings[connections.unread_certificates(source)] = None
        elif source.startswith(f"{WORLD}:") and not field.startswith("data."):
            models_directory()
    for line in filter(None, warnings):
        log(line)
    if home is not None:
        _check_disk(pathlib.Path(home))


def check_search(config: ConfigDict) -> None:
    """Refuse proxies and certificates that would make every search fail.

    Raises:
        ValueError: names the variable and its value.
    """
    for field, source in _search_sources(config).items():
        connections.check_source(source, f"config.{field}")


def _sources(c):
    """Return {field: source} of everything a configuration loads or connects to."""
    sources = {f"data.{split}": c.data[split] for split in ("train", "dev")}
    sources |= {f"{name}.source": c[name].source for name in ("model", "tokenizer")}
    sources |= _search_sources(c)
    roles = {role for kind in kinds(c) for role in roles_of(kind)}
    if not needs_judge(c.reward):
        roles -= {"judge"}
    sources |= {f"models.{n}.source": c.models[n].source for n in ROLES if n in roles}
    return {field: source for field, source in sources.items() if source}


def _search_sources(c):
    """Return {field: source} of the search engine."""
    r = c.retrieval
    sources = {"retrieval.reranker": r.reranker}
    if not r.engine:
        name = "url" if r.url else "encoder"
        sources[f"retrieval.{name}"] = r[name]
    return {field: source for field, source in sources.items() if source}


def _check_disk(home):
    """Refuse a run's directory on a full disk."""
    folder = home.absolute()
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < MIN_FREE_BYTES:
        raise ValueError(f"{home}: its disk has {free:,} bytes free; free some space")
