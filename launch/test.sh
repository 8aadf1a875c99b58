#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments go on to pytest:
#   bash launch/test.sh -m slow
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rsearch_environment tests/requirements.txt
ruff check .
ruff format --check .
exec python -m pytest "$@"
