"""Serve a trained policy over HTTP: python -m rsearch.serve --model=DIR --index=DIR

    curl -H "Content-Type: application/json" -d '{"question": "Who ...?"}' \\
        http://127.0.0.1:8000/search

    GET  /                     a web page for asking questions
    POST /search               {"question"} or {"questions"}; replies like rsearch.tool
    POST /v1/chat/completions  chats of OpenAI's clients, streaming or not
    GET  /v1/models            the model name that clients must use
    GET  /health, /ready       whether it runs, and whether the model is compiled
    GET  /metrics              counts and latencies, for Prometheus
    GET  /openapi.json         a machine-readable description of all this

The flags for the model, its index and its recipe are those of rsearch.tool.
"""

import sys
from collections.abc import Sequence

from rsearch.config.recipes import print_config, run_command
from rsearch.serving import service
from rsearch.tool import POLICY_FLAGS, read_policy

FLAGS = {**POLICY_FLAGS, **service.FLAGS}


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    config, load, values = read_policy(argv, FLAGS)
    if values["print_config"]:
        print_config(config)
    else:
        service.serve_policy(load, values)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
