#!/usr/bin/env bash
# Trains on a Cloud TPU slice: requests it, waits for it, copies the checkout to every
# host, installs, trains, shows the output, resumes after a preemption, and deletes it.
#   bash launch/tpu_pod.sh NAME --zone=us-west4-a --type=v5litepod-16 --mount=10.0.0.2:/share \
#       -- --config=configs/r_search.py --workdir=/shared/r_search
# Arguments after -- are passed to rsearch.train. Before it:
#   --zone=Z --type=T  zone and type of the slice; --project=P if not gcloud's default
#   --version=V        runtime version of the hosts (default: the one for the type)
#   --spot             a slice that may be preempted, and costs less
#   --mount=HOST:/DIR  NFS share (Filestore) to mount as /shared on every host
#   --attempts=N       slices to request in total, each after the last was lost (default: 10)
#   --existing         use a TPU VM that already exists, and do not delete it
#   --keep             do not delete the slice at the end
#   --dry_run          print the commands without running them
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

POLL_SECONDS=${POLL_SECONDS:-30}
MAX_FAILED_POLLS=20 # polls in a row in which gcloud may fail
MAX_ACTIVE_POLLS=4  # polls after a failure; a slice that is being lost stays active for a while
# A host that vanishes closes no connection: without these, ssh would wait for it for hours.
SSH_FLAG='-o ConnectTimeout=30 -o ServerAliveInterval=60 -o ServerAliveCountMax=5'
ATTEMPTS=10
ZONE='' TYPE='' VERSION='' MOUNT='' EXISTING='' KEEP='' DRY_RUN=''
COMMON=() EXTRA=()

fail() {
  echo "error: $*" >&2
  exit 2
}

NAME=${1:-}
case $NAME in
  '' | -*) fail "the slice's name comes first: launch/tpu_pod.sh NAME --zone=... --type=... -- ..." ;;
esac
shift
while [ $# -gt 0 ]; do
  case $1 in
    --zone=*) ZONE=${1#*=} ;;
    --type=*) TYPE=${1#*=} ;;
    --project=*) COMMON+=("$1") ;;
    --version=*) VERSION=${1#*=} ;;
    --spot) EXTRA+=(--spot) ;;
    --mount=*) MOUNT=${1#*=} ;;
    --attempts=*) ATTEMPTS=${1#*=} ;;
    --existing) EXISTING=yes ;;
    --keep) KEEP=yes ;;
    --dry_run) DRY_RUN=yes ;;
    --) break ;;
    *) fail "unknown argument $1; those of rsearch.train come after --" ;;
  esac
  shift
done
[ "${1:-}" = -- ] || fail "no -- and no arguments of rsearch.train after it"
shift
[ $# -gt 0 ] || fail "nothing to train after --"
[ -n "$ZONE" ] || fail "--zone=... is missing"
[ -n "$TYPE$EXISTING" ] || fail "--type=... is missing, for example v5litepod-16"
case $ATTEMPTS in
  '' | *[!0-9]* | 0) fail "--attempts=$ATTEMPTS is not a number from 1" ;;
esac
case $MOUNT in
  '' | ?*:/?*) ;;
  *) fail "--mount=$MOUNT: write HOST:/DIR" ;;
esac
if [ -z "$VERSION$EXISTING" ]; then
  case $TYPE in
    v5litepod-*) VERSION=v2-alpha-tpuv5-lite ;;
    v5p-*) VERSION=v2-alpha-tpuv5 ;;
    v6e-*) VERSION=v2-alpha-tpuv6e ;;
    v[234]-*) VERSION=tpu-ubuntu2204-base ;;
    *) fail "--type=$TYPE has no known runtime: name one with --version=..." ;;
  esac
fi
COMMON+=("--zone=$ZONE")
ARCHIVE=/tmp/rsearch-$NAME.tgz ERRORS=/tmp/rsearch-$NAME.err GCLOUD_WORKED='' MAY_EXIST=''
STARTED=$(date +%s)

log() {
  echo "$(date +%T) $*" >&2
}

# Runs a command, or prints it.
run() {
  if [ -n "$DRY_RUN" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

queued_resources() {
  local verb=$1
  shift
  gcloud compute tpus queued-resources "$verb" "$NAME" "${COMMON[@]}" "$@"
}

# The state of the requested slice: "" if there is none, UNKNOWN if gcloud fails.
slice_state() {
  if queued_resources describe --format='value(state.state)' 2>"$ERRORS"; then return; fi
  if ! grep -q NOT_FOUND "$ERRORS"; then
    tail -n 1 "$ERRORS" >&2
    echo UNKNOWN
  fi
}

# Warns that the slice may exist and cost money, however the script ends.
# shellcheck disable=SC2329 # the trap calls it
warn_slice_kept() {
  if [ -z "$MAY_EXIST" ]; then return; fi
  log "$NAME: the slice is kept; delete it with"
  log "  gcloud compute tpus queued-resources delete $NAME ${COMMON[*]} --force"
}
trap warn_slice_kept EXIT

on_all_hosts() {
  run gcloud compute tpus tpu-vm ssh "$NAME" "${COMMON[@]}" --worker=all --ssh-flag="$SSH_FLAG" \
    --command="$1"
}

create() {
  run gcloud compute tpus queued-resources create "$NAME" "${COMMON[@]}" \
    --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION" \
    ${EXTRA[@]+"${EXTRA[@]}"}
}

delete() {
  run gcloud compute tpus queued-resources delete "$NAME" "${COMMON[@]}" --force --quiet
}

# Runs create or delete, and prints why it fails. A refusal is final and ends the script.
run_gcloud() {
  if "$@" 2>"$ERRORS"; then return; fi
  cat "$ERRORS" >&2
  if grep -qE 'INVALID_ARGUMENT|PERMISSION_DENIED' "$ERRORS"; then
    if [ "$1" = create ]; then MAY_EXIST=''; fi
    fail "$NAME: gcloud refuses to $1 it"
  fi
  return 1
}

# Waits for the slice, and requests it if it does not exist or was lost. Returns 1 if the
# request failed; the failed slice is deleted before the next request.
wait_for_slice() {
  local state last_state='' is_requested='' failed_polls=0 poll_failed
  if [ -n "$EXISTING" ]; then return; fi
  if [ -n "$DRY_RUN" ]; then
    create
    return
  fi
  while true; do
    state=$(slice_state)
    if [ "$state" != "$last_state" ]; then log "$NAME: ${state:-not requested yet}"; fi
    if [ "$state" != UNKNOWN ]; then GCLOUD_WORKED=yes; fi
    # It never worked: the cause is not the network, but gcloud, the project or the zone.
    if [ -z "$GCLOUD_WORKED" ]; then fail "$NAME: gcloud cannot say whether it exists"; fi
    last_state=$state poll_failed=''
    # It may also exist although a request for it seems to have failed.
    if [ "$state" != UNKNOWN ]; then MAY_EXIST=yes; fi
    case $state in
      ACTIVE) return ;;
      UNKNOWN) poll_failed=yes ;;
      '')
        is_requested=yes
        run_gcloud create || poll_failed=yes
        ;;
      FAILED | SUSPENDED | SUSPENDING)
        if [ -n "$is_requested" ]; then
          queued_resources describe --format='yaml(state)' >&2 || true
          return 1
        fi
        run_gcloud delete || poll_failed=yes
        last_state=''
        ;;
    esac
    if [ -n "$poll_failed" ]; then failed_polls=$((failed_polls + 1)); else failed_polls=0; fi
    if [ "$failed_polls" = "$MAX_FAILED_POLLS" ]; then
      fail "$NAME: gcloud failed $MAX_FAILED_POLLS times in a row"
    fi
    sleep "$POLL_SECONDS"
  done
}

# Whether the slice is no longer active, or stops being active within the next polls.
is_lost() {
  local poll state
  for ((poll = 1; poll <= MAX_ACTIVE_POLLS; poll++)); do
    state=$(slice_state)
    case $state in
      ACTIVE | UNKNOWN) ;;
      *) return 0 ;;
    esac
    sleep "$POLL_SECONDS"
  done
  return 1
}

# gcloud refuses to reach all hosts if an ssh-agent has keys but lacks gcloud's own.
check_agent() {
  local key=~/.ssh/google_compute_engine agent_keys fingerprint
  if [ -z "${SSH_AUTH_SOCK:-}" ] || ! agent_keys=$(ssh-add -l 2>/dev/null); then return; fi
  if [ ! -e "$key.pub" ]; then
    fail "the ssh-agent lacks gcloud's key: gcloud compute config-ssh && ssh-add $key"
  fi
  fingerprint=$(ssh-keygen -lf "$key.pub") || fail "$key.pub cannot be read"
  fingerprint=${fingerprint#* }
  case $agent_keys in
    *" ${fingerprint%% *} "*) ;;
    *) fail "the ssh-agent lacks gcloud's key: ssh-add $key" ;;
  esac
}

# Packs the checkout; every attempt copies the same archive.
pack() {
  local files=(git ls-files -z --cached --others --exclude-standard)
  local archive=(tar --null --files-from=- -czf "$ARCHIVE")
  if [ -n "$DRY_RUN" ]; then
    echo "${files[*]} | ${archive[*]}"
  else
    "${files[@]}" | "${archive[@]}" || fail "the checkout could not be packed"
  fi
}

# Copies and installs; each step may be repeated. The caller handles failures, which turns
# off `set -e`, so each step returns explicitly.
prepare() {
  # A host that has just started may be updating itself.
  local mount='' apt='sudo apt-get -o DPkg::Lock::Timeout=600'
  if [ -n "$MOUNT" ]; then
    mount="sudo mkdir -p /shared && { mountpoint -q /shared || { $apt update -q &&"
    mount+=" $apt install -qy nfs-common && sudo mount $(printf %q "$MOUNT") /shared && sudo chmod 777 /shared; }; } && "
  fi
  run gcloud compute tpus tpu-vm scp "$ARCHIVE" "$NAME:rsearch.tgz" "${COMMON[@]}" --worker=all ||
    return
  on_all_hosts "${mount}mkdir -p rsearch && tar -C rsearch -xzf rsearch.tgz && cd rsearch && { \
command -v python3.11 >/dev/null || { $apt update -q && \
$apt install -qy python3.11 python3.11-venv; }; } && \
. launch/environment.sh && rsearch_environment launch/tpu.txt"
}

# If a connection breaks, gcloud runs the command again on that host while the first one
# still runs. The second waits until the first releases the lock, and ends with 75. Then
# all hosts start again together, since a single host would wait for the others in vain.
train() {
  local attempt_id=$STARTED-$attempt
  on_all_hosts "cd rsearch && . .venv/bin/activate && exec 9>../rsearch.lock && flock 9 && \
{ ! grep -qsx $attempt_id ../rsearch.begun || exit 75; } && echo $attempt_id >>../rsearch.begun && \
exec python -m rsearch.train$(printf ' %q' "$@") --coordinator=auto"
}

if [ -z "$DRY_RUN" ]; then check_agent; fi
pack
for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
  if ! wait_for_slice; then
    log "$NAME: request failed in attempt $attempt of $ATTEMPTS"
    continue
  fi
  code=0
  prepare && train "$@" || code=$?
  if [ "$code" = 0 ]; then
    if [ -n "$EXISTING$KEEP" ]; then exit; fi
    delete || exit 1
    MAY_EXIST=''
    exit
  fi
  # The run was asked to stop, and has saved its state.
  if [ "$code" = 75 ]; then
    log "$NAME: stopped in attempt $attempt of $ATTEMPTS; the run resumes"
    continue
  fi
  log "$NAME: ended with code $code"
  # Code 2 is an error in the command; any other may mean that the slice was lost.
  if [ -n "$EXISTING" ] || [ "$code" = 2 ] || ! is_lost; then
    exit "$code"
  fi
  log "$NAME: lost in attempt $attempt of $ATTEMPTS; the run resumes"
done
fail "$NAME: lost or stopped $ATTEMPTS times"
