"""Find passages for queries: encoders, ScaNN, indexes, reranking, services, the web.

Imports `text`, `hosts`, `runtime`, `models`, `protocols` and `tools`. Begin with
`engine.py`.
"""
