#!/usr/bin/env bash
# Sets everything up on a machine with NVIDIA GPUs and trains there. Arguments are passed
# to rsearch.train. With --dry_run first, it only prints what it would install and run:
#   bash launch/gpu_node.sh --config=configs/r_search.py --workdir=runs/r_search
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The driver decides which CUDA libraries run: CUDA 13 needs driver 580, CUDA 12 525.
rsearch_cuda_requirements() {
  local driver
  if ! driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader); then
    echo "error: nvidia-smi finds no GPU; on a CPU use launch/quickstart.sh" >&2
    return 2
  fi
  driver=${driver%%$'\n'*}
  if [ "${driver%%.*}" -ge 580 ]; then
    echo launch/cuda13.txt
  elif [ "${driver%%.*}" -ge 525 ]; then
    echo launch/cuda12.txt
  else
    echo "error: NVIDIA driver $driver is too old: 525 or newer is needed" >&2
    return 2
  fi
}

if [ "${1:-}" = --dry_run ]; then
  shift
  if command -v nvidia-smi >/dev/null; then
    requirements=$(rsearch_cuda_requirements)
    nvidia-smi --query-gpu=name,memory.total --format=csv,noheader | sort | uniq -c
  else
    echo "no GPU here; on a node with GPUs:"
    requirements='launch/cuda13.txt (with a driver below 580: launch/cuda12.txt)'
  fi
  echo "would install $requirements into ${RSEARCH_VENV:-.venv}"
  echo "the configuration is checked by python -m rsearch.train ... --dry_run"
  printf 'would run python -m rsearch.train'
  [ $# -eq 0 ] || printf ' %q' "$@"
  echo
  exit
fi
requirements=$(rsearch_cuda_requirements)
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader | sort | uniq -c
rsearch_environment "$requirements"
rsearch_gpu_memory
# Otherwise JAX would fall back to the CPU if CUDA fails, a thousand times slower.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda}
exec python -m rsearch.train "$@"
