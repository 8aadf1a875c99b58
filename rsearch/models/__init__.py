"""Networks in Flax and their tokenizers: decoder, LoRA, BERT, sharding.

Imports `runtime` and `hosts`. Begin with `decoder.py`; `attention/` holds the kinds of
attention, `hf/` reads and writes Hugging Face directories.
"""
