# Sourced by the other scripts: a virtual environment in .venv with the given
# requirements. Made once; installed again only where the requirements have changed.
#
#   RSEARCH_PYTHON   the Python to make it with (default: python3.12, 3.11 or python3)
#   RSEARCH_VENV     where it is (default: .venv in the checkout)

cd "$(dirname "${BASH_SOURCE[0]}")/.."

rsearch_python() {
  local candidate
  for candidate in "${RSEARCH_PYTHON:-}" python3.11 python3.12 python3; do
    if [ -n "$candidate" ] && "$candidate" -c '
import sys
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 or 3.12 is needed; name one in RSEARCH_PYTHON" >&2
  return 2
}

# rsearch_environment FILE: makes the environment and activates it.
rsearch_environment() {
  local requirements=$1 venv=${RSEARCH_VENV:-.venv} python stamp digest
  if [ ! -x "$venv/bin/python" ]; then
    python=$(rsearch_python) || return
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" || return
  fi
  # Test requirements read requirements.txt too, so both count.
  digest=$(cat requirements.txt "$requirements" | cksum | tr ' ' '-')
  stamp="$venv/installed-$digest"
  if [ ! -e "$stamp" ]; then
    echo "installing $requirements (minutes, the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      -r "$requirements" || return
    touch "$stamp"
  fi
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
}
