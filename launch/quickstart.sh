#!/usr/bin/env bash
# Sets everything up and trains the quickstart. Arguments are passed to rsearch.train:
#   bash launch/quickstart.sh --config.seed=1 --workdir=runs/seed1
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rsearch_environment requirements.txt
exec python -m rsearch.train --config=configs/quickstart.py "$@"
