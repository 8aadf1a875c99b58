"""The table of model families, through which config.json is read and written.

To add a family, add a file next to this one and a line in FAMILIES.
"""

import os
import pathlib

from rsearch.models.hf import glm, llama, qwen2, qwen3
from rsearch.models.hf.config import Family, write_decoder
from rsearch.models.hf.directory import read_object
from rsearch.models.hf.fields import Fields
from rsearch.models.spec import DecoderSpec

FAMILIES = {  # config.json's model_type -> the family
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "llama": llama.FAMILY,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "chatglm": glm.CHATGLM,
}

# Our config.json has the layout of this version of transformers, the first that knows
# all of these families. Without a version, and with more than 100,000 tokens,
# transformers calls the tokenizer wrong and advises an option that breaks it.
_LAYOUT_VERSION = "4.51.3"

# A loaded model gets its shape from its own config.json, never from this table.
PUBLISHED = {  # hub id -> shape
    hub_id: spec
    for family in FAMILIES.values()
    for hub_id, spec in family.published.items()
}


def read_spec(directory: str | os.PathLike) -> DecoderSpec:
    """Return the shape of the decoder that a directory's config.json describes.

    Raises:
        ValueError: there is no readable config.json, or a field has a value that
            `Decoder` does not compute; the message names the field, the value and what
            is supported.
    """
    fields = _read_fields(directory)
    return _family_of(fields).read(fields)


def read_family(directory: str | os.PathLike) -> Family:
    """Return the family that a directory's config.json names.

    Raises:
        ValueError: there is no readable config.json, or its model_type is not
            supported.
    """
    return _family_of(_read_fields(directory))


def find_family(spec: DecoderSpec) -> tuple[str, Family]:
    """Return the model_type and the Family of the first family that fits a shape.

    Raises:
        ValueError: transformers has no model of the shape.
    """
    for model_type, family in FAMILIES.items():
        if family.fits(spec):
            return model_type, family
    raise ValueError(f"transformers has no model of the shape {spec}")


def make_config(spec: DecoderSpec, *, dtype: str) -> dict:
    """Return the fields of config.json in a layout every version of transformers reads.

    Args:
        spec: the decoder's shape.
        dtype: transformers' name for the dtype of the weights.

    Raises:
        ValueError: transformers has no model of the shape.
    """
    model_type, family = find_family(spec)
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        **write_decoder(spec),
        **family.write(spec),
        "torch_dtype": dtype,
        "transformers_version": _LAYOUT_VERSION,
    }


def _read_fields(directory):
    path = pathlib.Path(directory) / "config.json"
    return Fields(path, read_object(path))


def _family_of(fields):
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    supported = f"it must be one of {sorted(FAMILIES)}"
    raise fields.refusal("model_type", model_type, supported)
