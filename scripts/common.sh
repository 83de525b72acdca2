# shellcheck shell=bash disable=SC2034
# Sourced by launch.sh, job.sh, zero_shot.sh and setup_env.sh: words for people, GPUs, and a command
# that signals reach.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
refuse() {
  say "$@"
  exit 2
}
require_count() { [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "$1=$2: must be a whole number, 1 or more"; }

# Sets PYTHON, unless it is given: the active virtual environment, or .venv, or python3.
choose_python() {
  local folder
  if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    for folder in "$repo/.venv" "${VIRTUAL_ENV:-}"; do
      if [[ -n $folder && -x $folder/bin/python ]]; then PYTHON=$folder/bin/python; fi
    done
  fi
  command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON: not found"
}

# Refuses a PYTHON in which the package is not installed, or not to the end.
require_packages() {
  local said
  said=$("$PYTHON" -c 'import sys
from importlib.util import find_spec
lacking = [name for name in sys.argv[1:] if find_spec(name) is None]
way_out = "; finish its installation (pip install .), or set PYTHON to another"
sys.exit("lacks " + ", ".join(lacking) + way_out if lacking else 0)' \
    torch numpy safetensors yaml tqdm 2>&1) || refuse "PYTHON=$PYTHON: ${said##*$'\n'}"
}

# Prints how many GPUs the machine has.
gpus_of_machine() { { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true; }

# Prints how many GPUs a process that is started here sees: CUDA_VISIBLE_DEVICES, which nvidia-smi
# ignores, may name fewer than there are.
count_gpus() {
  local seen names name
  seen=$(gpus_of_machine)
  if ((seen)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    seen=0
    IFS=, read -ra names <<<"$CUDA_VISIBLE_DEVICES"
    # CUDA looks no further than the first name that is none, such as -1.
    for name in "${names[@]}"; do
      [[ $name =~ ^\ *([0-9]+\ *$|GPU-|MIG-) ]] || break
      seen=$((seen + 1))
    done
  fi
  echo "$seen"
}

# The comment at the top of a script, as its help.
show_help() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$1"; }

# Runs a command to its end and leaves its exit code in `code`. Signals that come meanwhile go to
# `hand_on SIGNAL PID`, which a script may define anew, the last one to `asked`; `beside PID`, if
# defined, runs next to it.
hand_on() { kill "-$1" "$2" 2>/dev/null || true; }
run_to_the_end() {
  local signal companion=
  asked=
  # In the background, so that a signal is handed on at once and not when the run is over; as a
  # job of its own (-m), since a plain background process ignores Ctrl-C.
  set -m
  "$@" </dev/null &
  child=$!
  if declare -F beside >/dev/null; then
    beside "$child" </dev/null &
    companion=$!
    disown "$companion" # its end is nobody's news
  fi
  set +m
  for signal in TERM INT HUP USR1; do
    # shellcheck disable=SC2064 # the signal is meant as it is now
    trap "asked=$signal; hand_on $signal $child" "$signal"
  done
  code=0
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do
    code=0
    wait "$child" || code=$?
  done
  # All of its group, the `sleep` in it too.
  [[ -z $companion ]] || kill -KILL -- "-$companion" 2>/dev/null || true
}
