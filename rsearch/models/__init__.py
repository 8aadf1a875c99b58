"""Networks in Flax and their tokenizers: decoder, LoRA, BERT, sharding.

Imports `hosts` and `runtime`. Begin with `decoder.py`; `attention/` holds the kinds of
attention, `hf/` reads and writes Hugging Face directories.
"""
