"""Train and evaluate language models that reason and search, on JAX."""
