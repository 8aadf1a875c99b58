"""Directories with weights in another tool's layout: which tool, and how to merge them.

Only safetensors are read here. The files of a training or quantisation tool are
recognised by their names and never loaded, because pickles run code.
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
    '"two files hold a tensor of the same name: slices, or different models"); '
    "w = {k: t.clone().contiguous() for k, t in w}; "
    'save_file(w, out + ".part", {"format": "pt"}); os.replace(out + ".part", out)'
)
_MERGE_ADAPTER = (
    "import sys, peft, transformers; kind, source, words, out = sys.argv[1:]; "
    "getattr(peft, kind).from_pretrained(source).merge_and_unload()"
    ".save_pretrained(out); "
    "transformers.AutoTokenizer.from_pretrained(words).save_pretrained(out)"
)
_PEFT_CLASSES = {  # task_type of an adapter -> the class of peft that loads it
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
}
# Adapters that act beside the weights and cannot be merged into them.
_UNMERGEABLE_TYPES = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
    *("ADAPTION_PROMPT", "CPT", "XLORA", "POLY"),
)
_UNPACK_GGUF = (
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
_TENSOR_ENDINGS = {  # ending of the names of quantised tensors -> tools that write them
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
    """Return a shell command that converts pickled weights to one safetensors file."""
    return _python_command(_CONVERT, out, *pickles)


def describe_layout(directory: pathlib.Path) -> str | None:
    """Return which tool's layout a directory has, and how to make safetensors of it.

    Args:
        directory: directory without safetensors weights in the usual layout.

    Returns:
        Text for an error message, whose last line is the command if there is one; None
        if the files are not those of a known tool.
    """
    for describe in (
        _describe_pointers,
        _describe_incomplete,
        _describe_adapter,
        _describe_verl,
        _describe_deepspeed,
        _describe_megatron,
        _describe_distributed,
        _describe_shards,
        _describe_pickles,
        _describe_gguf,
        _describe_consolidated,
        _describe_frameworks,
    ):
        if text := describe(directory):
            return text
    return None


def describe_inside(directory: pathlib.Path) -> str | None:
    """Return an error text that names a directory's folders with models, or None."""
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
    folder_names = ", ".join(map(str, folders[-5:]))
    return f"{directory} is not a model, but holds models: name one of {folder_names}"


def refuse_quantized(source: pathlib.Path, value: object) -> None:
    """Refuse the quantization_config of a config.json unless it is absent or null.

    Raises:
        ValueError: names the method.
    """
    if value is not None:
        method = value.get("quant_method") if isinstance(value, dict) else value
        raise ValueError(_quantized_text(f"{source}: quantization_config", method))


def refuse_quantized_tensors(source: pathlib.Path, names: Iterable[str]) -> None:
    """Refuse tensors that only quantised weights have, whatever config.json says.

    Raises:
        ValueError: names a tensor and the tools that write such tensors.
    """
    for name in names:
        for ending, tools in _TENSOR_ENDINGS.items():
            if name.endswith(ending):
                raise ValueError(_quantized_text(f"{source}: tensor {name}", tools))


def missing_hint(directory: pathlib.Path) -> str:
    """Return advice on a missing shard as "; ...", or "" if the cause is unknown."""
    text = _describe_incomplete(directory)
    return f"; {text}" if text else ""


def _quantized_text(source, method):
    return (
        f"{source}: {method!r}: quantised weights are not supported; name the model "
        "that they were quantised from, in bfloat16, float16 or float32"
    )


def _quoted(*words):
    """Return words of a shell command as text."""
    return shlex.join(map(str, words))


def _python_command(program, *args):
    return f"python -c {_quoted(program, *args)}"


def _output_path(directory):
    """Return a path next to the directory, for a tool's output."""
    directory = directory.resolve()
    return directory.with_name(f"{directory.name}-merged")


def _entries(directory):
    """Return the sorted names in a directory, or [] if it does not exist."""
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def _by_number(path):
    """Return a sort key that puts step 9 before step 10."""
    return [(int(n) if n.isdecimal() else n) for n in re.split(r"(\d+)", str(path))]


def _newest_folder(directory):
    """Return the subfolder of the last step, or None."""
    names = [n for n in _entries(directory) if _STEP.fullmatch(n)]
    names = [n for n in names if (directory / n).is_dir()]
    return directory / max(names, key=_by_number) if names else None


def _describe_pointers(directory):
    suffixes = (*_PICKLE_SUFFIXES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx")
    names = [n for n in _entries(directory) if n.endswith(suffixes)]
    pointers = [n for n in names if is_pointer(directory / n)]
    if not pointers:
        return None
    return (
        f"{directory} holds git-lfs pointers instead of the files "
        f"{', '.join(pointers)}; fetch them with git lfs pull (needs git-lfs):\n"
        f"git -C {_quoted(directory)} lfs pull"
    )


def is_pointer(path: pathlib.Path) -> bool:
    """Return whether a file is a git-lfs pointer instead of the contents."""
    try:
        with open(path, "rb") as file:
            return file.read(40).startswith(b"version https://git-lfs.github.com")
    except OSError:
        return False


def _describe_incomplete(directory):
    """Describe an unfinished download, which leaves partial files or broken links."""
    partial_files = [*directory.glob("*.incomplete")]
    partial_files += directory.glob(".cache/huggingface/download/**/*.incomplete")
    partial_files += [
        p for p in directory.glob("*") if p.is_symlink() and not p.exists()
    ]
    in_cache = re.fullmatch(r"models--(.+)", directory.absolute().parent.parent.name)
    if in_cache:
        partial_files += (directory / ".." / ".." / "blobs").glob("*.incomplete")
    if not partial_files:
        return None
    text = f"the download of {directory} is incomplete ({partial_files[0].name}); "
    if not in_cache:
        return text + "run `hf download` as before, it continues where it stopped"
    return text + f"let it finish:\nhf download {in_cache[1].replace('--', '/')}"


def _describe_adapter(directory):
    path = directory / "adapter_config.json"
    if not path.is_file():
        return None
    config = files.read_json(path)
    config = config if isinstance(config, dict) else {}
    base, kind = config.get("base_model_name_or_path"), config.get("peft_type")
    text = f"{directory} holds a PEFT adapter ({kind}) of {base!r}, not a model; "
    if kind in _UNMERGEABLE_TYPES:
        return text + "such an adapter cannot be merged into weights"
    if not isinstance(base, str) or not base:
        return text + f"name the model it was trained on in {path}, and merge them"
    if base.startswith(("/", ".", "~")) and not pathlib.Path(base).is_dir():
        return text + f"{base} is not here: write its path into {path} and merge them"
    has_tokenizer = (directory / "tokenizer_config.json").is_file()
    command = _python_command(
        _MERGE_ADAPTER,
        _PEFT_CLASSES.get(str(config.get("task_type")), "AutoPeftModelForCausalLM"),
        *(directory, directory if has_tokenizer else base, _output_path(directory)),
    )
    return text + f"merge them (needs peft) and name the result:\n{command}"


def _describe_verl(directory):
    """Describe a verl checkpoint, given its run, step, actor or tokenizer folder."""
    step = _newest_folder(directory) or directory
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
        if model_folder := _model_folder(folder / "huggingface"):
            return text + f"and also a model: name {model_folder}"
        size = max((int(match[1]) for match in ranks), default=0)
        shards = (f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size))
        if name := next((shard for shard in shards if shard not in names), None):
            return text + f"of which {name} is missing: all {size} ranks are needed"
        args = backend, "--local_dir", folder, "--target_dir", _output_path(folder)
        command = f"python -m verl.model_merger merge --backend {_quoted(*args)}"
        return text + f"merge them (needs verl) and name the result:\n{command}"
    return None


def _model_folder(folder):
    """Return the folder if it holds a model's weights, else None."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return folder if any((folder / name).is_file() for name in names) else None


def _describe_deepspeed(directory):
    """Describe a DeepSpeed checkpoint, given its root or the folder of a tag."""

    def has_file(folder, *endings):
        return any(name.endswith(endings) for name in _entries(folder))

    state_endings = "model_states.pt", "optim_states.pt"
    # `latest` names the newest tag, which by default is "global_step<N>".
    newest_folder = directory / _first_line(directory / "latest")
    if newest_folder == directory or not newest_folder.is_dir():
        newest_folder = _newest_folder(directory)
    script = "zero_to_fp32.py"
    if has_file(directory, *state_endings):
        root, tag = directory.absolute().parent, directory.absolute()
    elif newest_folder is not None and has_file(newest_folder, *state_endings):
        root, tag = directory, newest_folder
    elif script in _entries(directory):
        return (
            f"{directory} holds DeepSpeed's {script}, but no folder with its states "
            "(global_step...), which hold the weights"
        )
    else:
        return None
    text = f"{tag} holds a checkpoint of DeepSpeed (ZeRO)"
    if not has_file(tag, state_endings[1]):
        return text + ", but its *_optim_states.pt, which hold the weights, are missing"
    path = root / script
    # An older copy of the script writes a pickle.
    is_new = path.is_file() and b"safe_serialization" in path.read_bytes()
    program = _quoted(path) if is_new else "-m deepspeed.utils.zero_to_fp32"
    out = root if (root / "config.json").is_file() else _output_path(root)
    command = f"python {program} {_quoted(root, out, '--tag', tag.name)}"
    advice = "" if out == root else " with its config.json and tokenizer copied there"
    return (
        f"{text}; gather its shards (needs deepspeed >= 0.16) and name {out}{advice}:\n"
        f"{command} --safe_serialization"
    )


def _describe_megatron(directory):
    names = _entries(directory)
    is_root = any(re.fullmatch(r"iter_\d+", name) for name in names)
    is_root |= {"latest_checkpointed_iteration.txt", "release"} <= {*names}
    is_step = any(re.fullmatch(r"mp_rank_\d+(_\d+)*", name) for name in names)
    if re.fullmatch(r"iter_\d+", directory.name):
        is_step |= _describe_distributed(directory) is not None
    if not is_root and not is_step:
        return None
    command = _python_command(
        _FROM_MEGATRON, "BASE", directory, _output_path(directory)
    )
    return (
        f"{directory} holds a checkpoint of Megatron-LM; export it (needs "
        "megatron-bridge; BASE is the Hugging Face model that it was trained from) and "
        f"name the result:\n{command}"
    )


def _first_line(path):
    """Return the name on a file's first line, or "" if there is no such file."""
    line = path.read_text(errors="replace") if path.is_file() else ""
    return pathlib.PurePath(line.strip()[:255]).name


def _describe_distributed(directory):
    """Describe torch.distributed.checkpoint shards, also as Accelerate names them."""
    for folder in (directory, directory / "pytorch_model_fsdp_0"):
        names = _entries(folder)
        if not any(name.endswith(".distcp") for name in names):
            continue
        text = f"{folder} holds shards of torch.distributed.checkpoint (*.distcp)"
        if ".metadata" not in names:
            return text + ", but not their .metadata, without which weights are lost"
        pickle_path = _output_path(folder)
        pickle_path = pickle_path.with_name(f"{pickle_path.name}.pt")
        program = "torch.distributed.checkpoint.format_utils dcp_to_torch"
        convert = convert_command(directory / "model.safetensors", [pickle_path])
        return (
            f"{text}; merge them if you trust them (needs torch; it opens pickles):\n"
            f"python -m {program} {_quoted(folder, pickle_path)} && {convert}"
        )
    return None


def _describe_shards(directory):
    """Describe safetensors shards without the index that tells where tensors are."""
    names = [n for n in _entries(directory) if n.endswith(".safetensors")]
    shards = [n for n in names if _SHARD.fullmatch(n)]
    if not shards:
        return None
    return (
        f"{directory} has shards such as {shards[0]}, but not "
        "model.safetensors.index.json, which lists the model's shards: fetch it"
    )


def _describe_pickles(directory):
    """Describe pickles written by torch, and how to convert them."""
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
        torch_names = [n for n in names if n.startswith("pytorch_model")]
        names = torch_names or [n for n in names if _is_pickle(directory / n)]
    shards = [match for n in names if (match := _SHARD.fullmatch(n))]
    shard_names = {
        f"{m[0][: m.start(2)]}{number:05}-of-{m[3]}{m[4]}"
        for m in shards
        for number in range(1, min(int(m[3]), 10_000) + 1)
    }
    missing = [n for n in {*names} | shard_names if not (directory / n).is_file()]
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
        text += ", but only the model's, which may be another than the one named here"
        names = names[:1]
    paths = [directory / name for name in names]
    return f"{text}:\n{convert_command(directory / 'model.safetensors', paths)}"


def _is_pickle(path):
    """Return whether a file was written by torch, not by OpenVINO or CTranslate2."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return is_pickled(file.read(4))


def is_pickled(start: bytes) -> bool:
    """Return whether a file that starts so is a pickle, bare or in torch's zip."""
    return start.startswith(b"PK\x03\x04") or bool(re.match(rb"\x80[\x00-\x05]", start))


def _describe_gguf(directory):
    names = [n for n in _entries(directory) if n.endswith(".gguf")]
    if not names:
        return None
    largest_file = max(names, key=lambda name: (directory / name).stat().st_size)
    text = f"{directory} holds GGUF files of llama.cpp ({', '.join(names)}); "
    if shard := _SHARD.fullmatch(largest_file):
        first_file = f"{largest_file[: shard.start(2)]}00001-of-{shard[3]}.gguf"
        joined_file = f"{directory / shard[1]}.gguf"
        return (
            text + "join them, move the shards away and name the directory again:\n"
            f"llama-gguf-split --merge {_quoted(directory / first_file, joined_file)}"
        )
    command = _python_command(
        _UNPACK_GGUF, directory, largest_file, _output_path(directory)
    )
    return (
        f"{text}quantised ones have lost precision: name the model they were made from "
        f"instead, or unpack the largest (needs torch, transformers and gguf):\n"
        f"{command}"
    )


def _describe_consolidated(directory):
    names = [n for n in _entries(directory) if n.startswith("consolidated")]
    if not names:
        return None
    return (
        f"{directory} holds {', '.join(names)}, with the names and slices of Llama's "
        "or Mistral's original release; name the same model in Hugging Face's layout, "
        "or make it with convert_llama_weights_to_hf.py or "
        "convert_mistral_weights_to_hf.py from transformers before version 5"
    )


def _describe_frameworks(directory):
    """Describe weights of TensorFlow, Flax and runtimes for compiled graphs."""
    names = _entries(directory)
    for framework, flag, endings in (
        ("TensorFlow", "from_tf", (".h5", ".ckpt.index")),
        ("Flax", "from_flax", (".msgpack",)),
    ):
        weight_names = [n for n in names if n.endswith(endings)]
        if weight_names:
            kind = _architecture(directory)
            command = _python_command(
                _RELOAD, kind, flag, directory, _output_path(directory)
            )
            return (
                f"{directory} holds weights of {framework} "
                f"({', '.join(weight_names)}); convert them (needs transformers < 5, "
                f"torch and {framework}), copy the tokenizer, and name the result:\n"
                f"{command}"
            )
    endings = (".onnx", ".xml", ".mlmodel", ".mlpackage", ".tflite", ".engine", ".ot")
    weight_names = [n for n in names if n.endswith(endings)]
    if not weight_names and (directory / "onnx").is_dir():
        weight_names = ["onnx"]
    if weight_names:
        return (
            f"{directory} holds a graph for another runtime "
            f"({', '.join(weight_names)}), whose weights cannot be read; name the "
            "model that it was exported from"
        )
    return None


def _architecture(directory):
    """Return the transformers class that config.json names, or else AutoModel."""
    path = directory / "config.json"
    config = files.read_json(path) if path.is_file() else {}
    names = config.get("architectures") if isinstance(config, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,99}", name):
        return "AutoModel"
    return name.removeprefix("TF").removeprefix("Flax")
