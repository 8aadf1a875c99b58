"""Models that are asked for text beside the policy: local ones and endpoints.

Imports `runtime`, `models`, `protocols`, `rollout` and `learn`. Begin with
`requests.py`.
"""
