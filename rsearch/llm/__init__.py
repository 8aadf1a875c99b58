"""Models that are asked for text beside the policy: local ones and endpoints.

Imports `rollout` and `models`. Begin with `endpoint.py`.
"""
