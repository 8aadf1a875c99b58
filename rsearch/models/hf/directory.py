"""Hugging Face directories: find or download them, and read their fields and tensors.

Only safetensors are read: a pickle runs code when it is opened.
"""

import os
import pathlib
import re
import shlex
from collections.abc import Mapping

import huggingface_hub
from safetensors import SafetensorError, safe_open

from rsearch.models.hf import layouts
from rsearch.runtime import files
from rsearch.runtime.boundary import boundary
from rsearch.runtime.connections import check_hub, describe_hub

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = ("F32", "BF16", "F16")
_MARKER_FILES = ("config.json", "modules.json", "tokenizer.json", "vocab.txt")
_RUN_FILE = "run.json"
# A download holds the configuration, the tokenizer and the top folder's safetensors.
_DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def find_model(source: str | os.PathLike) -> pathlib.Path:
    """Return the directory of a model: `source` itself, or a download of that hub id.

    Downloads are kept in huggingface_hub's cache.

    Raises:
        ValueError: `source` is neither a directory nor a hub id that could be fetched,
            the hub's repository has no safetensors weights, or the directory is a
            run's or holds another tool's checkpoint.
    """
    if not os.fspath(source):  # as a path it would be the working directory
        raise ValueError("the name of a model or encoder is empty")
    directory = files.expand(source)
    if directory.is_dir():
        # Loading reads the tokenizer first. If no such file is there, explaining the
        # layout comes before the complaint about a missing tokenizer.
        is_model = any((directory / name).is_file() for name in _MARKER_FILES)
        if not is_model and (layout := layouts.describe_layout(directory)):
            raise ValueError(layout)
        # A run also has a config.json, but that is its recipe.
        if (directory / _RUN_FILE).is_file() and not any(
            directory.glob("*.safetensors")
        ):
            raise ValueError(
                f"{directory} is a run, not a model; export its policy first: python "
                f"-m rsearch.export --workdir={shlex.quote(str(directory))} --out=model"
            )
        return directory
    check_hub(f"model {str(source)!r}")
    try:
        directory = huggingface_hub.snapshot_download(
            str(source),
            allow_patterns=list(_DOWNLOAD_PATTERNS),
            ignore_patterns=["*/*.safetensors"],
        )
    except Exception as error:  # from the hub, from httpx, or from the disk
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model {str(source)!r} is neither a local directory nor a Hugging Face "
            f"hub id that could be fetched ({type(error).__name__}: {reason})"
            f"{describe_hub(reason)}"
        ) from error
    directory = pathlib.Path(directory)
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"model {str(source)!r} has no safetensors weights on the hub, and only "
            "these are fetched; download everything and name the directory, model: the "
            "next error then says how to convert its files\n"
            f"hf download {shlex.quote(str(source))} --local-dir model"
        )
    return directory


def read_object(path: pathlib.Path) -> dict:
    """Return the object in a JSON file.

    Raises:
        ValueError: there is no such file, or it does not hold an object.
    """
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        problem = f"{path} does not exist, so its directory holds no model"
        if path.name == "config.json" and (reason := explain(path.parent)):
            problem += f": {reason}"
        raise ValueError(problem) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def open_tensors(directory: pathlib.Path) -> dict:
    """Open a checkpoint; return {name: safetensors slice}, reading only headers.

    Raises:
        ValueError: there are no safetensors weights, a file is missing, damaged or
            pickled, the index cannot be read, a tensor is stored twice or quantised, or
            an adapter lies next to the weights.
    """
    tensors = {}
    has_weights = any(
        (directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)
    )
    if has_weights and (directory / "adapter_config.json").is_file():
        raise ValueError(
            f"{directory} holds adapter_config.json beside a model's weights: because "
            "of it, transformers loads the adapter on top of another model; move the "
            "adapter or the weights away"
        )
    for file in _weight_files(directory):
        with boundary(str(file)):
            handle = _open_file(file)
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - it is no dict
        if duplicates := sorted(tensors.keys() & slices):
            raise ValueError(
                f"{file}: {duplicates[0]} is also stored in an earlier shard"
            )
        tensors |= slices
    layouts.refuse_quantized_tensors(directory, tensors)
    return tensors


def check_layers(
    tensors: Mapping[str, object], num_layers: int, *, source: pathlib.Path
) -> None:
    """Refuse more layers than there are tensors, before looking for each tensor.

    Raises:
        ValueError: names both numbers.
    """
    if num_layers > len(tensors):
        raise ValueError(
            f"{source}: config.json says num_hidden_layers={num_layers}, but there are "
            f"{len(tensors)} tensors"
        )


def find_misfits(
    tensors: Mapping[str, object], name: str, shape: tuple[int, ...]
) -> list[tuple[str, str, str, str]]:
    """Return a row for each thing that is wrong with one expected tensor.

    A row is (name, problem, expected, found).
    """
    if name not in tensors:
        return [(name, "missing", str(list(shape)), "-")]
    rows = []
    stored_shape = tensors[name].get_shape()
    if stored_shape != list(shape):
        rows.append((name, "shape", str(list(shape)), str(stored_shape)))
    dtype = tensors[name].get_dtype()
    if dtype not in STORED_DTYPES:
        rows.append((name, "dtype", " | ".join(STORED_DTYPES), dtype))
    return rows


def describe_extra(
    tensors: Mapping[str, object], name: str
) -> tuple[str, str, str, str]:
    """Return a row like those of `find_misfits` for a tensor that no parameter uses."""
    return (name, "extra", "-", str(tensors[name].get_shape()))


def refuse_misfits(
    rows: list[tuple[str, str, str, str]], *, source: pathlib.Path
) -> None:
    """Raise an error with a table of the rows of `find_misfits`, if there are any.

    Raises:
        ValueError: there are rows.
    """
    if rows:
        rows = sorted(
            rows, key=lambda row: re.sub(r"\d+", lambda n: n[0].zfill(9), row[0])
        )
        title = f"{source}: {len(rows)} tensors do not fit its config.json"
        raise ValueError(title + "\n" + _format_table(rows))


def _weight_files(directory):
    """Return the safetensors files that make up a checkpoint, in order."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ValueError(_explain_no_weights(directory))
    try:
        weight_map = files.read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()), key=str)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index}: no weight_map could be read: {error!r}") from None
    for name in names:
        is_name = isinstance(name, str) and name != ""
        if not is_name or pathlib.PurePath(name).name != name:
            raise ValueError(f"{index}: {name!r} is not the name of a file next to it")
        if not (directory / name).is_file():
            num_tensors = sum(file == name for file in weight_map.values())
            raise ValueError(
                f"{directory / name} is missing; according to {index.name} it holds "
                f"{num_tensors} tensors{layouts.missing_hint(directory)}"
            )
    return [directory / name for name in names]


def _open_file(file):
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        with open(file, "rb") as stream:
            start = stream.read(8)
        if layouts.is_pickled(start):
            command = layouts.convert_command(file, [file])
            raise ValueError(
                f"{file} is a pickle under another name, and pickles can run code; if "
                f"you trust it, convert it yourself (needs torch):\n{command}"
            ) from None
        hint = layouts.missing_hint(file.parent)
        if layouts.is_pointer(file):
            folder = shlex.quote(str(file.parent))
            hint = (
                f"; it is a git-lfs pointer (git lfs pull):\ngit -C {folder} lfs pull"
            )
        raise ValueError(f"{file} is damaged or incomplete: {error}{hint}") from None


def explain(directory: pathlib.Path) -> str | None:
    """Return why a directory holds no model if its files tell the reason; else None."""
    if not directory.is_dir():
        return None
    reason = layouts.describe_layout(directory)
    return reason or layouts.describe_inside(directory)


def _explain_no_weights(directory):
    """Explain why a directory without model.safetensors cannot be loaded."""
    if reason := explain(directory):
        return reason
    content = ", ".join(sorted(file.name for file in directory.iterdir())) or "nothing"
    return f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; it has {content}"


def _format_table(rows):
    rows = [("tensor", "problem", "expected", "found"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    widths.append(0)
    return "\n".join(
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths))
        for row in rows
    )
