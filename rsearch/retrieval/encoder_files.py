"""Read what an encoder's directory declares about how its vectors are computed.

Next to a model, sentence-transformers writes which modules it consists of
(modules.json), how token states are pooled (1_Pooling/config.json), where texts are
truncated (sentence_bert_config.json) and which prompts precede them
(config_sentence_transformers.json). Every field of these files is used, is known to
change no vector, or is refused: with the wrong pooling a model still computes vectors,
only worse ones.
"""

import dataclasses
import pathlib

from rsearch.models.hf.directory import read_object
from rsearch.models.hf.fields import MAX_NUMBER, Fields
from rsearch.runtime import files

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_POOLINGS = {  # mode in sentence-transformers -> pooling in rsearch.models.bert
    "mean": "mean",
    # The mean times sqrt(number of tokens), which scaling to length 1 undoes.
    "mean_sqrt_len_tokens": "mean",
    "cls": "cls",
    "max": "max",
    "lasttoken": "lasttoken",
}
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_WIDTHS = {"word_embedding_dimension", "embedding_dimension"}
_TRANSFORMER_FILES = [
    f"sentence_{name}_config.json"
    for name in (
        *("bert", "roberta", "distilbert", "camembert"),
        *("albert", "xlm-roberta", "xlnet"),
    )
]
_FORWARD = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
# Fields whose value must be that of a text encoder.
_TRANSFORMER_VALUES = {
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "modality_config": (None, _FORWARD),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
    "unpad_inputs": (None, False, True),
}
# Arguments for transformers' loaders, and the ones that change no vector.
_ARGUMENTS = (
    *("model_args", "config_args", "tokenizer_args", "processing_kwargs"),
    *("model_kwargs", "config_kwargs", "processor_kwargs", "tokenizer_kwargs"),
)
_HARMLESS_ARGUMENTS = {
    *("trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "use_cache"),
    *("device_map", "low_cpu_mem_usage", "add_pooling_layer"),
}
_PASSAGE_PROMPTS = ("document", "passage", "corpus")  # the first non-empty one counts


@dataclasses.dataclass(frozen=True)
class EncoderDeclarations:
    """The declarations in an encoder's directory; None for what is not declared.

    Attributes:
        model: the directory with its config.json, weights and vocabulary.
        pooling: (file that declares it, a pooling of rsearch.models.bert).
        includes_prompt: whether a prompt's tokens are pooled with the text's.
        prompts: (file that declares them, text before a query, text before a passage).
        widths: [(file, field, value)] of numbers that must equal the model's width.
        max_tokens: maximum length of a text, special tokens included.
        tokenizer_tokens: maximum input length according to the tokenizer.
        lower_case: whether texts are lower-cased before tokenization.
    """

    model: pathlib.Path
    pooling: tuple[pathlib.Path, str] | None
    includes_prompt: bool
    prompts: tuple[pathlib.Path, str, str] | None
    widths: tuple[tuple[pathlib.Path, str, object], ...]
    max_tokens: int | None
    tokenizer_tokens: int
    lower_case: bool


def read_declarations(directory: pathlib.Path) -> EncoderDeclarations:
    """Return what sentence-transformers' files in a directory declare.

    Raises:
        ValueError: names the file and the module or field that is not supported.
    """
    modules = _modules(directory)
    model, pooling, includes_prompt, is_normalized = directory, None, True, False
    widths = []
    for number, (kind, path, source) in enumerate(modules):
        if kind == "Transformer" and number == 0:
            model = path
        elif kind == "Pooling" and not pooling:
            fields = Fields(path / "config.json", read_object(path / "config.json"))
            pooling = fields.path, _read_pooling(fields)
            includes_prompt = fields.get("include_prompt") is not False
            widths += [
                (fields.path, n, fields.get(n)) for n in _WIDTHS & {*fields.values}
            ]
        elif kind == "Normalize" and pooling:
            _check_normalize(path / "config.json")
            is_normalized = True
        elif kind != "Dropout":  # has no effect outside training
            raise ValueError(
                f"{source}: module {number} is {kind!r}, which is not supported: an "
                "encoder is a Transformer, one Pooling and at most a Normalize"
            )
    if modules and not pooling:
        raise ValueError(
            f"{modules[0][2]}: it names no Pooling, so texts would have no vectors"
        )
    prompts = None
    if (directory / PROMPTS).is_file():
        fields = Fields(directory / PROMPTS, read_object(directory / PROMPTS))
        prompts = _read_prompts(fields, is_normalized)
        if fields.get("truncate_dim") is not None:
            widths.append((fields.path, "truncate_dim", fields.get("truncate_dim")))
    fields = _read_transformer(model)
    max_tokens = fields.get("max_seq_length")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | None):
        raise ValueError(
            f"{fields.path}: max_seq_length={max_tokens!r}, expected a whole number"
        )
    return EncoderDeclarations(
        model,
        pooling,
        includes_prompt,
        prompts,
        tuple(widths),
        max_tokens,
        _tokenizer_tokens(model / "tokenizer_config.json"),
        fields.get("do_lower_case") is True,
    )


def _modules(directory):
    """Return [(class, its folder, file or folder that declares it)] of the modules."""
    path = directory / MODULES
    if not path.is_file():
        # modules.json may be missing, e.g. after copying by hand: use folder names.
        folders = sorted(
            p for p in directory.glob("[0-9]_[A-Z]*") if (p / "config.json").is_file()
        )
        modules = [(p.name.partition("_")[2], p, p) for p in folders]
        if modules and modules[0][0] != "Transformer":
            modules.insert(0, ("Transformer", directory, directory))
        return modules
    entries = files.read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected a list of modules")
    modules = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: module {number} is {entry!r}, not an object")
        fields = Fields(path, entry, prefix=f"module {number}: ")
        _check_known(fields, {"idx", "name", "path", "type", "kwargs"})
        fields.check("kwargs", (None, []))
        kind, folder = entry.get("type"), entry.get("path", "")
        names = kind.split(".") if isinstance(kind, str) else [""]
        if names[0] != "sentence_transformers":
            supported = "it must be a module of sentence_transformers"
            raise fields.refusal("type", kind, supported)
        parts = pathlib.PurePath(folder).parts if isinstance(folder, str) else ("..",)
        if ".." in parts or pathlib.PurePath(folder).is_absolute():
            raise fields.refusal("path", folder, "it must be a folder next to the file")
        modules.append((names[-1], directory / folder, path))
    return modules


def _read_pooling(fields):
    """Return the pooling named in a Pooling's config.json."""
    _check_known(fields, {"pooling_mode", "include_prompt", *_POOLING_FLAGS, *_WIDTHS})
    for flag in (*_POOLING_FLAGS, "include_prompt"):
        fields.check(flag, (None, False, True))
    mode = fields.get("pooling_mode")
    modes = mode if isinstance(mode, list) else [mode]
    if mode is None:
        flags = [flag for flag in _POOLING_FLAGS if flag in fields.values]
        modes = [_POOLING_FLAGS[flag] for flag in flags if fields.get(flag)]
        if not flags:
            modes = ["mean"]  # sentence-transformers' default
    if len(modes) != 1 or str(modes[0]) not in _POOLINGS:
        mode_list = " and ".join(map(repr, modes)) or "none"
        raise ValueError(
            f"{fields.path}: its pooling is {mode_list}, which is not supported; "
            f"expected one of {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def _check_normalize(path):
    """Refuse a Normalize applied to anything except the pooled vector."""
    if path.is_file():
        fields = Fields(path, read_object(path))
        for name in fields.values:
            fields.check(name, (None, "sentence_embedding"))


def _read_prompts(fields, is_normalized):
    """Return (file, text before queries, text before passages); None if both are empty.

    Empty texts declare nothing: newer versions write them for every model.
    """
    known = {"prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"}
    _check_known(fields, {"__version__", "model_type", *known})
    fields.check("model_type", (None, "SentenceTransformer"))
    # Vectors have length 1 here, so their dot product is their cosine.
    products = ("dot", "dot_score") if is_normalized else ()
    fields.check("similarity_fn_name", (None, "cosine", "cos_sim", *products))
    prompts = fields.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise fields.refusal("prompts", prompts, "it must be an object of texts")
    default = fields.get("default_prompt_name")
    if default is not None and default not in list(prompts):  # it may be unhashable
        supported = f"it must name one of the prompts, {sorted(prompts)}"
        raise fields.refusal("default_prompt_name", default, supported)
    query = prompts.get("query") or prompts.get(default) or ""
    # A default prompt named "query" is not for passages.
    default = None if default == "query" else default
    passage_prompts = (prompts.get(name) for name in (*_PASSAGE_PROMPTS, default))
    passage = next(filter(None, passage_prompts), "")
    return (fields.path, query, passage) if query or passage else None


def _read_transformer(model):
    """Return the checked fields of a Transformer's file; no fields without a file."""
    path = next((model / n for n in _TRANSFORMER_FILES if (model / n).is_file()), None)
    fields = Fields(path or model, read_object(path) if path else {})
    known = {"max_seq_length", "do_lower_case", *_TRANSFORMER_VALUES, *_ARGUMENTS}
    _check_known(fields, known)
    for name, values in _TRANSFORMER_VALUES.items():
        fields.check(name, values)
    for name in _ARGUMENTS:
        value = fields.get(name) or {}
        if not isinstance(value, dict) or value.keys() - _HARMLESS_ARGUMENTS:
            raise fields.refusal(name, value, "it must be empty")
    fields.check("do_lower_case", (None, False, True))
    return fields


def _tokenizer_tokens(path):
    """Return model_max_length, which newer versions write instead of max_seq_length."""
    length = read_object(path).get("model_max_length") if path.is_file() else None
    # A missing or absurdly large value means that it was never set.
    is_set = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return length if is_set else MAX_NUMBER[int]


def _check_known(fields, known):
    """Refuse fields that no version of sentence-transformers is known to write."""
    for name in sorted(fields.values.keys() - known):
        supported = f"it is not among the known fields {', '.join(sorted(known))}"
        raise fields.refusal(name, fields.get(name), supported)
