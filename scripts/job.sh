#!/usr/bin/env bash
# Inside a Slurm job: starts the run once with launch.sh and, if it ended to be started again,
# gives the job back to the queue. Job scripts of LAUNCHER=sbatch call it; see launch.sh.
#   job.sh -- [FLAGS OF pretrain_gpt.py]
# A job goes back to the queue after exit code 75 or 6 alone, MAX_RESTARTS times at most (100), and
# not once LOST_STARTS (2) starts in a row brought no newer checkpoint. Not after RUN/STOP, Ctrl-C or
# scancel either. Where a rank vanished, the next start is on other nodes, if Slurm has any: no more
# than LOST_STARTS nodes are excluded so.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=slurm.sh
source "$repo/scripts/slurm.sh"

for variable in SLURM_JOB_ID RUN_DIR LOG_DIR PYTHON; do
  [[ -n ${!variable:-} ]] || refuse "$variable is not set: job scripts of LAUNCHER=sbatch start this"
done
[[ ${1:-} == -- ]] || refuse "${1:-nothing}: flags of pretrain_gpt.py come after --"
shift
restarts=${SLURM_RESTART_COUNT:-0}
starts=$LOG_DIR/starts-$SLURM_JOB_ID
excluded=$LOG_DIR/excluded-$SLURM_JOB_ID

# Prints variables of the environment from a list of names, and none whose name suggests a secret.
report_environment() {
  local name
  say "job $SLURM_JOB_ID (restarted $restarts times), $(date '+%F %T %z'), on $(hostname)"
  say "commit $(git -C "$repo" describe --always --dirty 2>/dev/null || echo unknown)," \
    "$("$PYTHON" --version 2>&1), $PYTHON"
  say "driver $({ nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null ||
    echo none; } | head -n 1), modules ${LOADEDMODULES:-none}"
  for name in $(compgen -e); do
    [[ ! $name =~ KEY|TOKEN|SECRET|PASS|CRED|AUTH|JWT ]] || continue
    case $name in
      SLURM_JOB_NAME | SLURM_JOB_NODELIST | SLURM_JOB_NUM_NODES | SLURM_JOB_PARTITION | \
        SLURM_NTASKS_PER_NODE | SLURM_CPUS_PER_TASK | SLURM_CPUS_ON_NODE | SLURM_GPUS_ON_NODE | \
        SLURM_JOB_END_TIME | CUDA_VISIBLE_DEVICES | ROCR_VISIBLE_DEVICES | OMP_NUM_THREADS | \
        MASTER_ADDR | MASTER_PORT | CUDA_DEVICE_MAX_CONNECTIONS | CUDA_MODULE_LOADING | \
        NCCL_* | TORCH_NCCL_* | TORCH_FR_* | GLOO_* | FI_* | MPICH_*)
        say "$name=${!name}"
        ;;
    esac
  done
}

# How the last start ended: STATE LEFT ITERATION NODE, a - for what is not known. NODE is that of a
# rank which vanished.
read_ending() {
  PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" - "$RUN_DIR" 2>/dev/null <<'PY' || echo - - - -
import sys
from megatron.status import read_status

status = read_status(sys.argv[1])
if status is None:
    print("- - - -")
else:
    node = status.node if status.lost and not status.node.split()[1:] else ""
    print(status.state, status.left or "-", status.iteration, node or "-")
PY
}

# Where the last start that trained saved, by the record of the run folder: --save may be a flag or
# a key of the YAML file.
saved_folder() {
  PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" - "$RUN_DIR" 2>/dev/null <<'PY' || echo "$RUN_DIR/checkpoints"
import sys
from pathlib import Path
from megatron.checkpoint.find import recorded_directory

print(recorded_directory(Path(sys.argv[1])))
PY
}

# The newest step that was saved, as far as folders and the last word of a run that left in order
# tell it.
saved_step() {
  local newest=0 folder number state iteration
  folder=$(saved_folder)
  for number in "$folder"/step_*; do
    number=${number##*/step_}
    if [[ $number =~ ^[0-9]{8,}$ ]] && ((10#$number > newest)); then newest=$((10#$number)); fi
  done
  read -r state _ iteration _ < <(read_ending)
  if [[ $state == left && $iteration =~ ^[0-9]+$ ]] && ((iteration > newest)); then
    newest=$iteration
  fi
  echo "$newest"
}

# Starts in a row, this one included, that began at or after step $1.
lost_starts() {
  local step lost=0
  while read -r step; do
    if ((step >= $1)); then lost=$((lost + 1)); else lost=0; fi
  done <"$starts"
  echo "$lost"
}

# Says why the job ends for good after exit code $1 and step $2; nothing if it may be requeued.
why_not_again() {
  local left lost state
  case $1 in
    75 | 6) ;;
    *)
      echo "exit code $1 is no reason to start again"
      return
      ;;
  esac
  read -r _ left _ < <(read_ending)
  lost=$(lost_starts "$2")
  if [[ $1 == 75 && ($left == STOP || $left == SIGINT) ]]; then
    echo "the run was told to stop ($left)"
  elif ((restarts >= ${MAX_RESTARTS:-100})); then
    echo "restarted $restarts times, MAX_RESTARTS"
  elif ((lost >= ${LOST_STARTS:-2})); then
    echo "$lost start(s) in a row brought nothing newer than the checkpoint of step $2"
  elif state=$(job_state) && [[ -n $state && $state != RUNNING ]]; then
    echo "Slurm is ending the job, which is $state"
  fi
}

# The node on which this start lost a rank; nothing where it lost none.
lost_node() {
  local node
  [[ $code == 6 && $RUN_DIR/status.json -nt $starts ]] || return 0
  read -r _ _ _ node < <(read_ending)
  [[ ! $node =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || echo "$node"
}

# shellcheck disable=SC2329 # called by common.sh
hand_on() {
  say "$1: handed on to the run"
  kill "-$1" "$2" 2>/dev/null || true
}

flags=("$@")
load_site
report_environment
began=$(saved_step)
echo "$began" >>"$starts"
run_to_the_end "$repo/scripts/launch.sh" -- "${flags[@]}"
step=$(saved_step)
reason=$(why_not_again "$code" "$step")
if [[ -n $reason ]]; then
  ((code == 0)) || say "not requeued: $reason"
else
  node=$(lost_node) without=
  [[ -z $node ]] || without=$(nodes_to_exclude "$node" "$excluded" "${LOST_STARTS:-2}")
  [[ -z $without ]] || echo "$node" >>"$excluded"
  # Said first: Slurm ends this script a moment after it has requeued the job.
  say "exit code $code at step $step, from step $began: requeueing${without:+ without $without, since $node lost a rank}"
  requeue "$without" || true
fi
exit "$code"
