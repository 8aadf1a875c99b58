"""Serve a trained policy over HTTP: python -m rsearch.serve --model=DIR --index=DIR

    curl -H "Content-Type: application/json" -d '{"question": "Who ...?"}' \\
        http://127.0.0.1:8000/search

    GET  /                     a page that asks, for people
    POST /search               {"question"} or {"questions"}, as rsearch.tool answers
    POST /v1/chat/completions  as OpenAI's clients ask, streaming or not
    GET  /v1/models            the name to ask for
    GET  /health, /ready       whether it runs, and whether the model is compiled
    GET  /metrics              counts and latencies, for Prometheus
    GET  /openapi.json         all of this, in words that programs read

The model, its index and its recipe are named as for rsearch.tool.
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
