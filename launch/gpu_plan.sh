#!/usr/bin/env bash
# Compiles a recipe's programs for a node of NVIDIA GPUs on a machine without one, and
# prints their memory, kernels and least seconds. It makes a separate environment with
# JAX's CUDA backend (5.6 GB). Arguments are passed to rsearch.plan:
#   bash launch/gpu_plan.sh --config=configs/r_search.py --topology=h100x8 --stage=rl
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export RSEARCH_VENV=${RSEARCH_VENV:-.venv-gpu-plan}
rsearch_environment launch/cuda12.txt
export JAX_PLATFORMS=cpu # the CUDA plugin still compiles, and no GPU is needed
exec python -m rsearch.plan "$@"
