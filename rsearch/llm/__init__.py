"""Models that are asked for text beside the policy: local ones and endpoints.

Imports `runtime`, `models`, `protocols` and `rollout`. Begin with `endpoint.py`.
"""
