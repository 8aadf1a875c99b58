"""Run as python -m rsearch.plan; see `rsearch.plan.command`."""

import sys

from rsearch.config.recipes import run_command
from rsearch.plan.command import command

if __name__ == "__main__":
    sys.exit(run_command(command))
