"""Write a random BERT with a few thousand parameters as a Hugging Face directory."""

import json

import numpy as np
from safetensors.numpy import save_file

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB += ["the", "city", "river", "un", "##want", "##ed", "want", "a", "b", "c", "##c"]
VOCAB += [",", "?", "é", "e", "É", "σ", "ς", "中", "##s", "ab"]


def write_tiny_bert(
    directory,
    *,
    seed=0,
    prefix="",
    changed=None,
    dtype=np.float32,
    cross_encoder=False,
    positions=32,
):
    """Write config.json, vocab.txt, tokenizer_config.json and model.safetensors.

    Args:
        seed: seed of the weights.
        prefix: prefix of the tensors' names.
        changed: {name: array, or None to omit the tensor} that overrides tensors.
        dtype: dtype of the weights.
        cross_encoder: whether to add the head of a BertForSequenceClassification with
            one label.
        positions: the longest text that it takes, in tokens.
    """
    width, mlp, layers = 24, 40, 2
    config = {
        "model_type": "bert",
        "vocab_size": len(VOCAB),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 3,
        "intermediate_size": mlp,
        "max_position_embeddings": positions,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    shapes = {
        "embeddings.word_embeddings.weight": (len(VOCAB), width),
        "embeddings.position_embeddings.weight": (positions, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
        "pooler.dense.weight": (width, width),
        "pooler.dense.bias": (width,),
    }
    for layer in range(layers):
        for name, shape in {
            "attention.self.query": (width, width),
            "attention.self.key": (width, width),
            "attention.self.value": (width, width),
            "attention.output.dense": (width, width),
            "attention.output.LayerNorm": (width,),
            "intermediate.dense": (mlp, width),
            "output.dense": (width, mlp),
            "output.LayerNorm": (width,),
        }.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    rng = np.random.default_rng(seed)
    tensors = {
        # Norms scale by about one.
        name: (("Norm.weight" in name) + rng.normal(0, 0.3, shape)).astype(dtype)
        for name, shape in shapes.items()
    }
    tensors.update(changed or {})
    tensors = {prefix + name: t for name, t in tensors.items() if t is not None}
    if cross_encoder:
        tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
        tensors["classifier.weight"] = rng.normal(0, 1, (1, width)).astype(dtype)
        tensors["classifier.bias"] = rng.normal(0, 1, 1).astype(dtype)
        config |= {"architectures": ["BertForSequenceClassification"]}
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "vocab.txt").write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": True})
    )
    return directory
