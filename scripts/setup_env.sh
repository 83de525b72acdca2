# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: one virtual environment, made once, brought up to date when
# pyproject.toml, constraints.txt or radius/native.c change, or a C compiler comes.
#   PYTHON  interpreter to make it with   (first of python3, python3.14 .. 3.11 that is new enough)
#   VENV    where it lies                 (.venv in the repository)

# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

venv=${VENV:-$repo/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the interpreter to use; refuses where there is none that will do.
find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON: not found"
    is_new_enough "$PYTHON" || refuse "PYTHON=$PYTHON: $("$PYTHON" --version 2>&1); 3.11 or newer is needed"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  refuse "Python 3.11 or newer is needed and was not found; install it, or set PYTHON to it"
}

# make_environment EXTRAS: after it, "$venv/bin/python" has the package with these extras.
make_environment() {
  local extras=$1 python wanted stamp constraints=()
  # Told also where an environment is there already and it would not be used.
  [[ -z ${PYTHON:-} ]] || find_python >/dev/null
  if ! { [[ -x $venv/bin/pip ]] && is_new_enough "$venv/bin/python"; }; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      refuse "$python has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"
    # One that others made may only lack a module that is not loaded, or a pip.
    if [[ -e $venv && -n $(ls -A "$venv") ]] && ! compgen -G "$venv/.installed-*" >/dev/null; then
      refuse "VENV=$venv: exists, and no Python 3.11 with pip starts in it; name another folder, or remove it"
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
  fi
  # The environment is also for starts that see other GPUs than this one.
  if [[ $(gpus_of_machine) == 0 ]]; then
    constraints=(-c constraints.txt)
  fi
  # The folder belongs in it: the package is installed as a link to the sources.
  wanted=$(cat "$repo/pyproject.toml" "$repo/constraints.txt" "$repo/radius/native.c" - <<<"$repo ${constraints[*]} $(command -v cc || true)" | cksum)
  stamp=$venv/.installed-$extras
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    return
  fi
  say "installing the package with [$extras] (the first time this fetches torch)"
  local quiet=()
  [[ -t 2 ]] || quiet=(--quiet)
  (cd "$repo" && "$venv/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" \
    "${constraints[@]}" -e ".[$extras]" </dev/null >&2) || return
  printf '%s\n' "$wanted" >"$stamp"
}
