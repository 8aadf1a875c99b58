"""Directories whose weights are of another tool: which it is, and what merges them.

Only safetensors are read here. What a training or quantisation tool has left instead is
recognised by the names of its files, never opened: pickles run code.
"""

import os
import pathlib
import re
import shlex
from collections.abc import Iterable

from rsearch.runtime import files

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = (
    *("training_args", "optimizer", "optim_", "scheduler", "rng_state", "scaler"),
    *("random_states", "extra_state", "trainer_state", "sampler", "dataloader"),
)
_CONVERT = (
    "import os, sys, torch; from safetensors.torch import save_file; "
    "out, *files = sys.argv[1:]; "
    'inner = lambda d: next((inner(d[k]) for k in ("state_dict", "model", "module") '
    "if isinstance(d.get(k), dict)), d); "
    'w = [(k, t) for f in files for k, t in inner(torch.load(f, map_location="cpu", '
    "weights_only=True)).items() if torch.is_tensor(t)]; "
    'w or sys.exit("no tensors"); '
    "len(w) == len(dict(w)) or sys.exit("
    '"two files hold tensors of one name: slices of it, or another model"); '
    "w = {k: t.clone().contiguous() for k, t in w}; "
    'save_file(w, out + ".part", {"format": "pt"}); os.replace(out + ".part", out)'
)
_MERGE_ADAPTER = (
    "import sys, peft, transformers; kind, source, words, out = sys.argv[1:]; "
    "getattr(peft, kind).from_pretrained(source).merge_and_unload()"
    ".save_pretrained(out); "
    "transformers.AutoTokenizer.from_pretrained(words).save_pretrained(out)"
)
_ADAPTED = {  # task_type of an adapter -> the class of peft that loads it
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
}
# Adapters that stand beside the weights and cannot be added to them.
_UNMERGEABLE = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
    *("ADAPTION_PROMPT", "CPT", "XLORA", "POLY"),
)
_UNGGUF = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer "
    "as T; d, f, out = sys.argv[1:]; "
    "[c.from_pretrained(d, gguf_file=f).save_pretrained(out) for c in (M, T)]"
)
_RELOAD = (
    "import sys, transformers as t; kind, flag, source, out = sys.argv[1:]; "
    "getattr(t, kind).from_pretrained(source, **{flag: True}).save_pretrained(out)"
)
_FROM_MEGATRON = (
    "import sys; from megatron.bridge import AutoBridge as B; base, source, out = "
    "sys.argv[1:]; B.from_hf_pretrained(base).export_ckpt(source, out)"
)
_RANK = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_STEP = re.compile(r"(?:global_step_?|iter_|checkpoint-)(\d+)")
_SHARD = re.compile(r"(.+?)[-_.]?(\d{5})-of-(\d{5})(\.\w+)")
_QUANTIZED = {  # how tensors of quantised weights end -> tools that make them
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight_scale_inv": "FP8",
    "_blocks": "MXFP4",
}


def convert_command(out: str | os.PathLike, pickles: Iterable) -> str:
    """Return a shell line that turns pickled weights into one safetensors file."""
    return _python(_CONVERT, out, *pickles)


def describe_layout(directory: pathlib.Path) -> str | None:
    """Return whose layout a directory has, and what makes safetensors of it.

    Args:
        directory: without safetensors weights in the usual layout.

    Returns:
        Text for an error, whose last line is the command where there is one; None if no
        known tool writes such files.
    """
    for describe in (
        _pointers,
        _incomplete,
        _adapter,
        _verl,
        _deepspeed,
        _megatron,
        _distributed,
        _shards_alone,
        _pickled,
        _gguf,
        _consolidated,
        _other_frameworks,
    ):
        if text := describe(directory):
            return text
    return None


def describe_inside(directory: pathlib.Path) -> str | None:
    """Return which folders of a directory hold models, for an error; None if none."""
    folders = sorted(
        {
            file.parent
            for pattern in ("*", "*/*", "*/*/*")
            for name in ("model.safetensors", "model.safetensors.index.json")
            for file in directory.glob(f"{pattern}/{name}")
        },
        key=_by_number,
    )
    if not folders:
        return None
    shown = ", ".join(map(str, folders[-5:]))
    return f"{directory} is not a model's, but holds some: name one of {shown}"


def refuse_quantized(source: pathlib.Path, value: object) -> None:
    """Refuse the quantization_config of a config.json, unless it is absent or null.

    Raises:
        ValueError: names the method.
    """
    if value is not None:
        method = value.get("quant_method") if isinstance(value, dict) else value
        raise ValueError(_quantized_text(f"{source}: quantization_config", method))


def refuse_quantized_tensors(source: pathlib.Path, names: Iterable[str]) -> None:
    """Refuse tensors that only quantised weights have, whatever config.json says.

    Raises:
        ValueError: names a tensor and the tools that write such.
    """
    for name in names:
        for ending, tools in _QUANTIZED.items():
            if name.endswith(ending):
                raise ValueError(_quantized_text(f"{source}: tensor {name}", tools))


def missing_hint(directory: pathlib.Path) -> str:
    """Return what to do about a shard that is missing, as "; ..."; "" if unknown."""
    text = _incomplete(directory)
    return f"; {text}" if text else ""


def _quantized_text(where, method):
    return (
        f"{where}: {method!r}: quantised weights are not computed here; name the model "
        "that they were quantised from, in bfloat16, float16 or float32"
    )


def _python(program, *args):
    args = " ".join(shlex.quote(str(arg)) for arg in args)
    return f"python -c {shlex.quote(program)} {args}"


def _merged(directory):
    """Return the name of a directory beside it, for what a tool writes."""
    directory = directory.resolve()
    return directory.with_name(f"{directory.name}-merged")


def _entries(directory):
    """Return the names in a directory, [] if there is none."""
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def _by_number(path):
    """Sort step 9 before step 10."""
    return [(int(n) if n.isdecimal() else n) for n in re.split(r"(\d+)", str(path))]


def _newest(directory):
    """Return the folder of the last step, or None."""
    names = [n for n in _entries(directory) if _STEP.fullmatch(n)]
    names = [n for n in names if (directory / n).is_dir()]
    return directory / max(names, key=_by_number) if names else None


def _pointers(directory):
    suffixes = (*_PICKLE_SUFFIXES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx")
    names = [n for n in _entries(directory) if n.endswith(suffixes)]
    pointers = [n for n in names if is_pointer(directory / n)]
    if not pointers:
        return None
    return (
        f"{directory} holds git-lfs pointers in the place of {', '.join(pointers)}; "
        f"fetch the files by git lfs pull (needs git-lfs):\n"
        f"git -C {shlex.quote(str(directory))} lfs pull"
    )


def is_pointer(path: pathlib.Path) -> bool:
    """Return whether a file is git-lfs's pointer to its contents."""
    try:
        with open(path, "rb") as file:
            return file.read(40).startswith(b"version https://git-lfs.github.com")
    except OSError:
        return False


def _incomplete(directory):
    """Return that a download has not ended: its partial files, or links to nothing."""
    partial = [*directory.glob("*.incomplete")]
    partial += directory.glob(".cache/huggingface/download/**/*.incomplete")
    partial += [p for p in directory.glob("*") if p.is_symlink() and not p.exists()]
    in_cache = re.fullmatch(r"models--(.+)", directory.absolute().parent.parent.name)
    if in_cache:
        partial += (directory / ".." / ".." / "blobs").glob("*.incomplete")
    if not partial:
        return None
    text = f"the download of {directory} is incomplete ({partial[0].name}); "
    if not in_cache:
        return text + "run `hf download` as before, it goes on where it stopped"
    return text + f"let it end:\nhf download {in_cache[1].replace('--', '/')}"


def _adapter(directory):
    path = directory / "adapter_config.json"
    if not path.is_file():
        return None
    config = files.read_json(path)
    config = config if isinstance(config, dict) else {}
    base, kind = config.get("base_model_name_or_path"), config.get("peft_type")
    text = f"{directory} holds a PEFT adapter ({kind}) of {base!r}, not a model; "
    if kind in _UNMERGEABLE:
        return text + "such an adapter cannot be merged into weights"
    if not isinstance(base, str) or not base:
        return text + f"write the model it was trained on into {path}, and merge it"
    if base.startswith(("/", ".", "~")) and not pathlib.Path(base).is_dir():
        return text + f"{base} is not here: write into {path} where it is, and merge it"
    has_words = (directory / "tokenizer_config.json").is_file()
    command = _python(
        _MERGE_ADAPTER,
        _ADAPTED.get(str(config.get("task_type")), "AutoPeftModelForCausalLM"),
        *(directory, directory if has_words else base, _merged(directory)),
    )
    return text + f"merge them (needs peft) and name the result:\n{command}"


def _verl(directory):
    """Describe a checkpoint of verl, named by its run, step, actor or tokenizer."""
    step = _newest(directory) or directory
    for folder in (directory, step, step / "actor", directory.parent):
        if folder == directory.parent and directory.name != "huggingface":
            continue
        names = _entries(folder)
        ranks = [match for name in names if (match := _RANK.fullmatch(name))]
        is_megatron = "dist_ckpt" in names and "huggingface" in names
        if not ranks and not is_megatron:
            continue
        backend = "fsdp" if ranks else "megatron"
        text = f"{folder} holds a checkpoint of verl ({backend.upper()} shards), "
        if ready := _ready(folder / "huggingface"):
            return text + f"and beside it a model: name {ready}"
        size = max((int(match[1]) for match in ranks), default=0)
        shards = (f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size))
        if name := next((shard for shard in shards if shard not in names), None):
            return text + f"of which {name} is missing: all {size} ranks are needed"
        source, out = (shlex.quote(str(path)) for path in (folder, _merged(folder)))
        command = (
            f"python -m verl.model_merger merge --backend {backend} "
            f"--local_dir {source} --target_dir {out}"
        )
        return text + f"merge them (needs verl) and name the result:\n{command}"
    return None


def _ready(folder):
    """Return the folder if it holds a model's weights, else None."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return folder if any((folder / name).is_file() for name in names) else None


def _deepspeed(directory):
    """Describe a checkpoint of DeepSpeed, named by its root or by a tag's folder."""

    def holds(folder, *endings):
        return any(name.endswith(endings) for name in _entries(folder))

    states = "model_states.pt", "optim_states.pt"
    # `latest` names the newest tag, which is "global_step<N>" unless somebody chose it.
    newest = directory / _first_line(directory / "latest")
    if newest == directory or not newest.is_dir():
        newest = _newest(directory)
    script = "zero_to_fp32.py"
    if holds(directory, *states):
        root, tag = directory.absolute().parent, directory.absolute()
    elif newest is not None and holds(newest, *states):
        root, tag = directory, newest
    elif script in _entries(directory):
        return (
            f"{directory} holds {script} of DeepSpeed, but no folder with its states "
            "(global_step...), which hold the weights"
        )
    else:
        return None
    text = f"{tag} holds a checkpoint of DeepSpeed (ZeRO)"
    if not holds(tag, states[1]):
        return text + ", but its *_optim_states.pt, which hold the weights, are missing"
    path = root / script
    # An older copy of the script writes a pickle.
    is_new = path.is_file() and b"safe_serialization" in path.read_bytes()
    program = shlex.quote(str(path)) if is_new else "-m deepspeed.utils.zero_to_fp32"
    out = root if (root / "config.json").is_file() else _merged(root)
    words = " ".join(shlex.quote(str(word)) for word in (root, out))
    command = f"python {program} {words} --tag {shlex.quote(tag.name)}"
    rest = "" if out == root else " with its config.json and tokenizer beside it"
    return (
        f"{text}; gather its shards (needs deepspeed >= 0.16) and name {out}{rest}:\n"
        f"{command} --safe_serialization"
    )


def _megatron(directory):
    names = _entries(directory)
    is_root = any(re.fullmatch(r"iter_\d+", name) for name in names)
    is_root |= {"latest_checkpointed_iteration.txt", "release"} <= {*names}
    is_step = any(re.fullmatch(r"mp_rank_\d+(_\d+)*", name) for name in names)
    if re.fullmatch(r"iter_\d+", directory.name):
        is_step |= _distributed(directory) is not None
    if not is_root and not is_step:
        return None
    command = _python(_FROM_MEGATRON, "BASE", directory, _merged(directory))
    return (
        f"{directory} holds a checkpoint of Megatron-LM; export it (needs "
        "megatron-bridge; BASE is the Hugging Face model that it began as) and name "
        f"the result:\n{command}"
    )


def _first_line(path):
    """Return the name in a file, "" without one."""
    line = path.read_text(errors="replace") if path.is_file() else ""
    return pathlib.PurePath(line.strip()[:255]).name


def _distributed(directory):
    """Describe torch.distributed.checkpoint, also as Accelerate and FSDP name it."""
    for folder in (directory, directory / "pytorch_model_fsdp_0"):
        names = _entries(folder)
        if not any(name.endswith(".distcp") for name in names):
            continue
        text = f"{folder} holds shards of torch.distributed.checkpoint (*.distcp)"
        if ".metadata" not in names:
            return text + ", but not their .metadata, without which they are lost"
        pickled = _merged(folder)
        pickled = pickled.with_name(f"{pickled.name}.pt")
        joined = " ".join(shlex.quote(str(path)) for path in (folder, pickled))
        program = "torch.distributed.checkpoint.format_utils dcp_to_torch"
        convert = convert_command(directory / "model.safetensors", [pickled])
        return (
            f"{text}; merge them (needs torch, and trust: it opens pickles):\n"
            f"python -m {program} {joined} && {convert}"
        )
    return None


def _shards_alone(directory):
    """Describe safetensors without the index that says which tensor lies where."""
    names = [n for n in _entries(directory) if n.endswith(".safetensors")]
    shards = [n for n in names if _SHARD.fullmatch(n)]
    if not shards:
        return None
    return (
        f"{directory} has shards such as {shards[0]}, but not "
        "model.safetensors.index.json, which says what belongs to the model: fetch it"
    )


def _pickled(directory):
    """Describe pickles of torch, and how they are converted."""
    index = directory / "pytorch_model.bin.index.json"
    if (directory / "pytorch_model.bin").is_file():
        names = ["pytorch_model.bin"]
    elif index.is_file():
        try:
            weight_map = files.read_json(index)["weight_map"]
            names = sorted(map(os.fspath, {*weight_map.values()}))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return f"{index}: no weight_map could be read: {error!r}"
    else:
        names = [n for n in _entries(directory) if n.endswith(_PICKLE_SUFFIXES)]
        names = [n for n in names if not n.startswith((*_NOT_WEIGHTS, "consolidated."))]
        usual = [n for n in names if n.startswith("pytorch_model")]
        names = usual or [n for n in names if _is_pickle(directory / n)]
    shards = [match for n in names if (match := _SHARD.fullmatch(n))]
    needed = {
        f"{m[0][: m.start(2)]}{number:05}-of-{m[3]}{m[4]}"
        for m in shards
        for number in range(1, min(int(m[3]), 10_000) + 1)
    }
    missing = [n for n in {*names} | needed if not (directory / n).is_file()]
    if missing:
        return (
            f"{directory} holds pickled weights, of which {min(missing)} is missing: "
            f"fetch it{missing_hint(directory)}"
        )
    if not names:
        return None
    text = f"{directory} holds pickled weights only ({', '.join(names)}), and pickles "
    text += "can run code; if you trust them, convert them yourself (needs torch)"
    if len(shards) < len(names) > 1:
        text += ", the one that is the model's, which may be another than in this line"
        names = names[:1]
    paths = [directory / name for name in names]
    return f"{text}:\n{convert_command(directory / 'model.safetensors', paths)}"


def _is_pickle(path):
    """Return whether this is a file of torch, not of OpenVINO or CTranslate2."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return is_pickled(file.read(4))


def is_pickled(start: bytes) -> bool:
    """Return whether a file that begins so is a pickle, in torch's zip or bare."""
    return start.startswith(b"PK\x03\x04") or bool(re.match(rb"\x80[\x00-\x05]", start))


def _gguf(directory):
    names = [n for n in _entries(directory) if n.endswith(".gguf")]
    if not names:
        return None
    largest = max(names, key=lambda name: (directory / name).stat().st_size)
    text = f"{directory} holds GGUF files of llama.cpp ({', '.join(names)}); "
    if shard := _SHARD.fullmatch(largest):
        first = f"{largest[: shard.start(2)]}00001-of-{shard[3]}.gguf"
        joined = f"{directory / shard[1]}.gguf"
        args = f"{shlex.quote(str(directory / first))} {shlex.quote(joined)}"
        return (
            text + "join them, move the shards away and name the directory again:\n"
            f"llama-gguf-split --merge {args}"
        )
    command = _python(_UNGGUF, directory, largest, _merged(directory))
    return (
        f"{text}quantised ones have lost precision: better name the model they were "
        f"made from, or unpack the largest (needs torch, transformers and gguf):\n"
        f"{command}"
    )


def _consolidated(directory):
    names = [n for n in _entries(directory) if n.startswith("consolidated")]
    if not names:
        return None
    return (
        f"{directory} holds {', '.join(names)}, the first release's own names and "
        "slices (Llama's or Mistral's); name the same model in Hugging Face's layout, "
        "or make it by transformers' convert_llama_weights_to_hf.py or "
        "convert_mistral_weights_to_hf.py, before version 5"
    )


def _other_frameworks(directory):
    """Describe weights of TensorFlow, Flax and runtimes of compiled graphs."""
    names = _entries(directory)
    for framework, flag, endings in (
        ("TensorFlow", "from_tf", (".h5", ".ckpt.index")),
        ("Flax", "from_flax", (".msgpack",)),
    ):
        held = [n for n in names if n.endswith(endings)]
        if held:
            kind = _architecture(directory)
            command = _python(_RELOAD, kind, flag, directory, _merged(directory))
            return (
                f"{directory} holds weights of {framework} ({', '.join(held)}); "
                f"convert them (needs transformers < 5, torch and {framework}), copy "
                f"the tokenizer, and name the result:\n{command}"
            )
    endings = (".onnx", ".xml", ".mlmodel", ".mlpackage", ".tflite", ".engine", ".ot")
    held = [n for n in names if n.endswith(endings)]
    if not held and (directory / "onnx").is_dir():
        held = ["onnx"]
    if held:
        return (
            f"{directory} holds a graph for another runtime ({', '.join(held)}), from "
            "which no weights are read; name the model that it was exported from"
        )
    return None


def _architecture(directory):
    """Return transformers' class of a model that config.json names, else AutoModel."""
    path = directory / "config.json"
    config = files.read_json(path) if path.is_file() else {}
    names = config.get("architectures") if isinstance(config, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,99}", name):
        return "AutoModel"
    return name.removeprefix("TF").removeprefix("Flax")
