#!/usr/bin/env bash
# The one launcher: starts pretrain_gpt.py on as many ranks as asked for, here or in an allocation.
#   scripts/launch.sh [--dry-run] [-- FLAGS OF pretrain_gpt.py]
# --dry-run checks the flags, prints the job script on stdout and starts nothing.
#   LAUNCHER        local, torchrun, srun, mpiexec    (torchrun for more than one rank, else local)
#   NODES           machines                                                                    (1)
#   RANKS_PER_NODE  processes on each                                              (GPUs seen, or 1)
#   CONFIG          YAML file; may be left out where flags say it all
#   GRAD_PATH       how gradients travel                                     (as the YAML file says)
#   RUN_DIR         run folder                                          (runs/<name of CONFIG>)
#   TIME            limit of a Slurm step                                                     (none)
#   SITE            settings of this machine, scripts/site/$SITE.env                         (local)
#   PYTHON          interpreter             (active virtual environment, or .venv, or python3)
#   RENDEZVOUS      host:port of one node: torchrun with NODES > 1, started once on each node
# Exits with the run's own code (README, exit codes), which torchrun and srun would lose.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'launch.sh: %s\n' "$*" >&2; }
refuse() {
  say "$@"
  exit 2
}
require_count() { [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "$1=$2: must be a whole number, 1 or more"; }

dry_run=false
while (($#)); do
  case $1 in
    --dry-run) dry_run=true ;;
    -h | --help)
      sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) refuse "$1: unknown; flags of pretrain_gpt.py come after --" ;;
  esac
  shift
done
flags=("$@")

# The site may set defaults of everything below, and these two.
srun_flags=()
mpiexec_flags=()
site=${SITE:-local}
[[ $site =~ ^[A-Za-z0-9_-]+$ ]] || refuse "SITE=$site: letters, digits, _ and - only"
site_file=$repo/scripts/site/$site.env
if [[ ! -f $site_file ]]; then
  known=("$repo"/scripts/site/*.env)
  known=("${known[@]##*/}")
  refuse "SITE=$site: no scripts/site/$site.env; there are: ${known[*]%.env}"
fi
# shellcheck source=site/local.env
source "$site_file"

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  for folder in "$repo/.venv" "${VIRTUAL_ENV:-}"; do
    if [[ -n $folder && -x $folder/bin/python ]]; then PYTHON=$folder/bin/python; fi
  done
fi
command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON: not found"

if [[ -z ${RANKS_PER_NODE:-} ]]; then
  RANKS_PER_NODE=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)
  ((RANKS_PER_NODE)) || RANKS_PER_NODE=1
fi
NODES=${NODES:-1}
require_count NODES "$NODES"
require_count RANKS_PER_NODE "$RANKS_PER_NODE"
world=$((NODES * RANKS_PER_NODE))

if [[ -z ${RUN_DIR:-} ]]; then
  name=gpt
  [[ -z ${CONFIG:-} ]] || name=$(basename "$CONFIG" .yaml)
  RUN_DIR=runs/$name
fi
# A flag wins over the environment; the launcher must know the folder, for the exit code.
for ((i = 0; i < ${#flags[@]}; i++)); do
  case ${flags[i]} in
    --run-dir=*) RUN_DIR=${flags[i]#*=} ;;
    --run-dir) RUN_DIR=${flags[i + 1]:-} ;;
  esac
done
while [[ $RUN_DIR == ?*/ ]]; do RUN_DIR=${RUN_DIR%/}; done
[[ ${RUN_DIR##*/} =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
  refuse "RUN_DIR=$RUN_DIR: the last part may hold letters, digits, . _ - and must not begin with . or -"

program=("${PROGRAM:-$repo/pretrain_gpt.py}")
[[ -z ${CONFIG:-} ]] || program+=(--config "$CONFIG")
[[ -z ${GRAD_PATH:-} ]] || program+=(--grad-path "$GRAD_PATH")
program+=(--run-dir "$RUN_DIR" "${flags[@]}")

default=local
((world == 1)) || default=torchrun
LAUNCHER=${LAUNCHER:-$default}
case $LAUNCHER in
  local)
    ((world == 1)) || refuse "LAUNCHER=local: starts one rank, not $world; use torchrun, srun or mpiexec"
    command=("$PYTHON" "${program[@]}")
    ;;
  torchrun)
    # torchrun kills itself on USR1 unless told to hand it on.
    command=("$PYTHON" -m torch.distributed.run --max-restarts 0
      --signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
      --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE")
    if ((NODES == 1)); then
      # A port of its own; 127.0.0.1 since a machine's own name need not resolve.
      command+=(--standalone --local-addr 127.0.0.1)
    else
      [[ ${RENDEZVOUS:-} == ?*:?* ]] ||
        refuse "LAUNCHER=torchrun NODES=$NODES: set RENDEZVOUS=host:port, alike on every node"
      command+=(--rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_DIR##*/}")
    fi
    command+=("${program[@]}")
    ;;
  srun)
    $dry_run || command -v srun >/dev/null || refuse "LAUNCHER=srun: srun not found; Slurm is not installed here"
    # Without the first two, srun waits for the whole run after a rank has died.
    command=(srun --kill-on-bad-exit=1 --wait=60 --nodes "$NODES" --ntasks "$world"
      --ntasks-per-node "$RANKS_PER_NODE")
    # srun does not inherit the allocation's value from Slurm 22.05 on.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || command+=(--cpus-per-task "$SLURM_CPUS_PER_TASK")
    [[ -z ${TIME:-} ]] || command+=(--time "$TIME")
    command+=("${srun_flags[@]}" "$PYTHON" "${program[@]}")
    ;;
  mpiexec)
    mpiexec=$(dirname "$(command -v "$PYTHON")")/mpiexec
    [[ -x $mpiexec ]] || mpiexec=mpiexec
    $dry_run || command -v "$mpiexec" >/dev/null ||
      refuse "LAUNCHER=mpiexec: mpiexec not found; run: pip install 'sparsetron[mpi]'"
    # MPICH's kills every rank the moment one is lost, before they could tell which it was; they
    # leave by themselves, with a word.
    if [[ $("$mpiexec" --version 2>/dev/null || true) == HYDRA* ]]; then
      mpiexec_flags=(-disable-auto-cleanup "${mpiexec_flags[@]}")
    fi
    command=("$mpiexec" -n "$world" "${mpiexec_flags[@]}" "$PYTHON" "${program[@]}")
    ;;
  sbatch)
    refuse "LAUNCHER=sbatch: not supported yet; in an allocation (salloc) use LAUNCHER=srun"
    ;;
  *) refuse "LAUNCHER=$LAUNCHER: must be local, torchrun, srun or mpiexec" ;;
esac

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
  cores=$(nproc)
  threads=${SLURM_CPUS_PER_TASK:-$((cores / RANKS_PER_NODE))}
  OMP_NUM_THREADS=$((threads > 1 ? threads : 1))
fi
export OMP_NUM_THREADS

# A wrong setting is told here, once, with its own exit code and before any rank is started.
if [[ -z ${PROGRAM:-} ]]; then
  RANK=0 WORLD_SIZE=$world LOCAL_RANK=0 "$PYTHON" "${program[@]}" --dry-run >/dev/null || exit
fi

say "$LAUNCHER, $NODES node(s) x $RANKS_PER_NODE rank(s), $OMP_NUM_THREADS thread(s) each, run folder $RUN_DIR"
printf -v line '%q ' "${command[@]}"
if $dry_run; then
  printf '#!/usr/bin/env bash\nset -euo pipefail\ncd %q\nexport OMP_NUM_THREADS=%q\nexec %s\n' \
    "$PWD" "$OMP_NUM_THREADS" "${line% }"
  exit 0
fi
say "${line% }"

# In the background, so that a signal is handed on at once and not when the run is over; as a job
# of its own (-m), since a plain background process ignores Ctrl-C.
began=$(mktemp)
trap 'rm -f "$began"' EXIT
set -m
"${command[@]}" </dev/null &
child=$!
set +m
for signal in TERM INT HUP USR1; do
  # shellcheck disable=SC2064 # both are meant as they are now
  trap "kill -$signal $child 2>/dev/null || true" "$signal"
done
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do
  code=0
  wait "$child" || code=$?
done

# torchrun turns every code into 1, srun and mpiexec some into 137: status.json has the true one. A
# run that never said there how it ended was cut short, whatever code its processes left with.
if [[ $RUN_DIR/status.json -nt $began ]]; then
  export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
  recorded=$("$PYTHON" -m megatron.guards.autopsy "$RUN_DIR" 2>/dev/null) || recorded=
  if [[ -n $recorded && $recorded != 0 ]] && { ((code)) || [[ $recorded == 6 ]]; }; then
    code=$recorded
  fi
  # Last of all, since torchrun buries it under its own traceback.
  if ((code)) && [[ $LAUNCHER != local || $recorded == 6 ]]; then
    "$PYTHON" - "$RUN_DIR" >&2 <<'PY' || true
import sys
from megatron.status import read_status

status = read_status(sys.argv[1])
if status is not None and status.state == "failed":
    print(f"launch.sh: rank {status.rank}: {' '.join(status.reason.split())}")
PY
  fi
fi
exit "$code"
