# Sourced by the other scripts; makes a virtual environment in .venv with the given
# requirements. It is made once, and reinstalled only if the requirements have changed.
#
#   RSEARCH_PYTHON   the Python to make it with (default: python3.11, 3.12 or python3)
#   RSEARCH_VENV     its directory (default: .venv in the checkout; .venv-tests for tests)
#   RSEARCH_INSTALLER  pip (the default) or uv, which must then be on the PATH

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# rsearch_supports_python PYTHON: whether it runs and has a version that the requirements
# fit.
rsearch_supports_python() {
  "$1" -c '
import sys
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

rsearch_find_python() {
  local candidate
  if [ -n "${RSEARCH_PYTHON:-}" ]; then
    if rsearch_supports_python "$RSEARCH_PYTHON"; then
      echo "$RSEARCH_PYTHON"
      return
    fi
    echo "error: RSEARCH_PYTHON=$RSEARCH_PYTHON is not Python 3.11 or 3.12" >&2
    return 2
  fi
  for candidate in python3.11 python3.12 python3; do
    if rsearch_supports_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 or 3.12 is needed: install one, for example by" \
    "'uv python install 3.12', or name one in RSEARCH_PYTHON" >&2
  return 2
}

# rsearch_environment FILE: makes the environment and activates it.
rsearch_environment() {
  local requirements=$1 venv=${RSEARCH_VENV:-.venv}
  mkdir -p "$(dirname "$venv")" || return
  # If several jobs start together, one makes it while the others wait for the lock.
  (
    if command -v flock >/dev/null && { exec 9>"${venv%/}.lock"; } 2>/dev/null; then
      flock 9 || echo "${venv%/}.lock cannot be locked; continuing without a lock" >&2
    fi
    rsearch_create_environment "$requirements" "$venv"
  ) || return
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
  # It puts the path at which it was made first on the PATH; python would be another.
  if ! [ "$(dirname "$(type -P python)")" -ef "$venv/bin" ]; then
    rsearch_refuse_environment "$venv" "was made elsewhere and then moved or copied"
  fi
}

# rsearch_refuse_environment VENV FAULT: says what to do about it, and returns 2.
rsearch_refuse_environment() {
  echo "error: $1 $2; remove it, or name another directory in RSEARCH_VENV" >&2
  return 2
}

# rsearch_create_environment FILE VENV: makes the environment and installs FILE, unless
# already done.
rsearch_create_environment() {
  local requirements=$1 venv=$2 python base name stamp old_stamp
  # On a cluster, the Python that it was made with may be on other nodes only.
  if [ -L "$venv/bin/python" ] && [ ! -e "$venv/bin/python" ]; then
    rsearch_refuse_environment "$venv" "is of a Python that this machine does not have"
    return
  fi
  if ! rsearch_is_made "$venv"; then
    python=$(rsearch_find_python) || return
    echo "making $venv with $("$python" --version)"
    rm -f "$venv"/installed-* # this Python may be another, without any package
    "$python" -m venv "$venv" || return
    # A bin/python that already exists is kept, also if it is of another version.
    if ! rsearch_is_made "$venv"; then
      rsearch_refuse_environment "$venv" "was made in part by another Python"
      return
    fi
  elif ! rsearch_supports_python "$venv/bin/python"; then
    rsearch_refuse_environment "$venv" "is not of Python 3.11 or 3.12"
    return
  fi
  rsearch_check_cuda "$requirements" "$venv" || return
  # Test requirements include requirements.txt, so the digests of both count.
  base="$venv/installed-$(rsearch_digest requirements.txt)" name=${requirements//\//_}
  stamp="$base-$name-$(rsearch_digest "$requirements")"
  if [ ! -e "$stamp" ]; then
    # Stamps of other versions of requirements.txt, or of this file, are about to become
    # wrong.
    for old_stamp in "$venv"/installed-*; do
      case $old_stamp in
        "$base-$name"-*) rm -f "$old_stamp" ;;
        "$base"-*) ;;
        *) rm -f "$old_stamp" ;;
      esac
    done
    echo "installing $requirements (minutes, the first time)"
    rsearch_install "$requirements" "$venv" || return
    touch "$stamp"
  fi
}

# rsearch_is_made VENV: whether nothing is missing. It has no pip if ensurepip is missing,
# and no activate, which is written last, if it was interrupted.
rsearch_is_made() {
  [ -e "$1/bin/activate" ] && "$1/bin/python" -m pip --version >/dev/null 2>&1
}

# rsearch_check_cuda FILE VENV: refuses to install one version of CUDA beside the other.
# Both plugins register as "cuda", in random order; the second one fails to.
rsearch_check_cuda() {
  local plugin
  for plugin in "$2"/lib/python3.*/site-packages/jax_plugins/xla_cuda*; do
    case $1:$plugin in
      *cuda12.txt:*/xla_cuda13 | *cuda13.txt:*/xla_cuda12)
        rsearch_refuse_environment "$2" "has CUDA ${plugin##*/xla_cuda}, not that of $1"
        return
        ;;
    esac
  done
}

# rsearch_install FILE VENV: installs FILE into an existing environment.
rsearch_install() {
  case ${RSEARCH_INSTALLER:-pip} in
    pip)
      "$2/bin/python" -m pip install --quiet --disable-pip-version-check -r "$1"
      ;;
    uv)
      uv pip install --quiet --python "$2/bin/python" -r "$1"
      ;;
    *)
      echo "error: RSEARCH_INSTALLER=$RSEARCH_INSTALLER is neither pip nor uv" >&2
      return 2
      ;;
  esac
}

# rsearch_gpu_memory: lets JAX take more of a GPU than its default of 75 %, unless the
# user has set any of these variables. JAX refuses the fraction's old and new name together.
rsearch_gpu_memory() {
  local name
  for name in XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_MEM_FRACTION \
    XLA_PYTHON_CLIENT_PREALLOCATE XLA_PYTHON_CLIENT_ALLOCATOR; do
    if [ -n "${!name:-}" ]; then return; fi
  done
  export XLA_CLIENT_MEM_FRACTION=.92
}

rsearch_digest() {
  cksum <"$1" | tr ' ' '-'
}
