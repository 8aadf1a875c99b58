#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments are passed to pytest:
#   bash launch/test.sh -m slow
set -euo pipefail
# Tests have a separate environment: the tests of plans need libtpu, which makes every
# command on a machine without a TPU print warnings.
export RSEARCH_VENV=${RSEARCH_VENV:-.venv-tests}
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rsearch_environment tests/requirements.txt
ruff check .
ruff format --check .
# Two at a time: most of a test's time is compilation, which uses one core.
if [ $# = 0 ]; then set -- -n 2 --dist loadfile; fi
exec python -m pytest "$@"
