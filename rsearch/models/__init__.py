"""Networks in Flax and their tokenizers: decoder, LoRA, BERT, sharding.

Imports `hosts` and `runtime`. Start with `decoder.py`; `attention/` holds the attention
implementations, and `hf/` reads and writes Hugging Face directories.
"""
