# shellcheck shell=bash disable=SC2034
# Sourced by launch.sh, job.sh, zero_shot.sh, setup_env.sh and doctor.sh: words for people, the site
# and its modules, GPUs, and a command that signals reach.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
refuse() {
  say "$@"
  exit 2
}
require_count() { [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "$1=$2: must be a whole number, 1 or more"; }

# Reads the file of SITE: defaults of launch.sh's variables, lists of flags, and modules, which are
# loaded. Called before anything calls Python, which a module may bring.
load_site() {
  local file known
  SITE=${SITE:-local}
  [[ $SITE =~ ^[A-Za-z0-9_-]+$ ]] || refuse "SITE=$SITE: letters, digits, _ and - only"
  file=$repo/scripts/site/$SITE.env
  if [[ ! -f $file ]]; then
    known=("$repo"/scripts/site/*.env)
    known=("${known[@]##*/}")
    refuse "SITE=$SITE: no scripts/site/$SITE.env; there are: ${known[*]%.env}"
  fi
  sbatch_flags=() srun_flags=() mpiexec_flags=() modules=()
  # shellcheck source=site/local.env
  source "$file"
  load_modules "${modules[@]}"
}

# Loads environment modules, and refuses what cannot be loaded. A shell that is no login shell may
# lack the function `module`, which clusters define in one of these files.
load_modules() {
  local file said failed=false
  (($#)) || return 0
  set +u # neither these files nor everybody's modules are written for it
  for file in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" \
    /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
    if declare -F module >/dev/null; then break; fi
    # shellcheck disable=SC1090 # the machine's own
    [[ ! -r $file ]] || source "$file" >&2 || true
  done
  declare -F module >/dev/null ||
    refuse "modules=($*): cannot be loaded, since there is no function module here"
  file=$(mktemp)
  # Not in a subshell, which would keep what the modules set for itself. Version 3 of Environment
  # Modules fails with code 0.
  module load "$@" >"$file" 2>&1 || failed=true
  set -u
  said=$(tr -s '[:space:]' ' ' <"$file") && rm -f "$file"
  said=${said% }
  if $failed || [[ $said == *:ERROR:* ]]; then refuse "module load $*: ${said:0:200}"; fi
  [[ -z $said ]] || say "module load $*: $said"
}

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

# Refuses a PYTHON that lacks one of these packages, as one does that is not installed to the end.
require_packages() {
  local said
  said=$("$PYTHON" -c 'import sys
from importlib.util import find_spec
lacking = [name for name in sys.argv[1:] if find_spec(name) is None]
way_out = "; finish its installation (pip install .), or set PYTHON to another"
sys.exit("lacks " + ", ".join(lacking) + way_out if lacking else 0)' \
    "$@" 2>&1) || refuse "PYTHON=$PYTHON: ${said##*$'\n'}"
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
