"""Ask models other than the policy for text: local models and endpoints.

Imports `runtime`, `models`, `protocols`, `rollout` and `learn`. Begin with
`requests.py`.
"""
