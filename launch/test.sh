#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments go on to pytest:
#   bash launch/test.sh -m slow
set -euo pipefail
# An environment of their own: with libtpu, which the tests of plans need, every command
# of a machine without a TPU would print its complaints.
export RSEARCH_VENV=${RSEARCH_VENV:-.venv-tests}
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rsearch_environment tests/requirements.txt
ruff check .
ruff format --check .
# Two at a time: most of a test is compilation, on one core.
if [ $# = 0 ]; then set -- -n 2 --dist loadfile; fi
exec python -m pytest "$@"
