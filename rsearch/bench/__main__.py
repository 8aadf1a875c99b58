"""Run as python -m rsearch.bench; see `rsearch.bench.command`."""

import sys

from rsearch.bench.command import main
from rsearch.config.recipes import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
