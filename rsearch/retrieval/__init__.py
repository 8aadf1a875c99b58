"""From queries to passages: encoders, ScaNN, indexes, reranking, services, the web.

Imports `models` and `runtime`. Begin with `engine.py`.
"""
