#!/usr/bin/env bash
# The one launcher: starts pretrain_gpt.py, or the script ENTRY, on as many ranks as asked for, here or in an allocation,
# or submits a Slurm job that does and goes back to the queue until the run is done.
#   scripts/launch.sh [--dry-run] [FLAGS OF sbatch] [-- FLAGS OF pretrain_gpt.py]
# Flags and the files they name are checked before anything is started or submitted; where only the
# compute nodes have the files, give --check-paths false behind the --.
# --dry-run checks as well, prints the job script on stdout and starts nothing; with sbatch it
# also makes the folder of the job's log, which Slurm does not make for a script that is submitted
# by hand, and asks Slurm whether and when such a job could start. Flags of sbatch, with LAUNCHER=sbatch
# alone, are written --name=value: --account=..., --partition=..., --exclude=..., --dependency=...
#   LAUNCHER        local, torchrun, srun, mpiexec, sbatch   (torchrun for several ranks, else local)
#   NODES           machines                                                                    (1)
#   RANKS_PER_NODE  processes on each; set it for sbatch on a login node               (GPUs seen, or 1)
#   CONFIG          YAML file; may be left out where flags say it all
#   ENTRY           script of this repository that trains: pretrain_gpt.py, pretrain_vision.py, ...
#                                 (that in the first line of CONFIG: # pretrain_...; or pretrain_gpt.py)
#   GRAD_PATH       how gradients travel                                     (as the YAML file says)
#   RUN_DIR         run folder                                          (runs/<name of CONFIG>)
#   TIME            limit of a Slurm job, in Slurm's notation; in an allocation its own counts   (60)
#   SITE            settings of this machine, scripts/site/$SITE.env                         (local)
#   PYTHON          interpreter             (active virtual environment, or .venv, or python3)
#   RENDEZVOUS      host:port of one node: torchrun with NODES > 1, started once on each node
#   CPUS_PER_TASK   cores of each rank, for Slurm                                            (site's)
#   MPIEXEC         program that LAUNCHER=mpiexec calls              (that of PYTHON, or mpiexec)
#   SLURM_MPI_TYPE  srun's plugin that starts MPI, where a run needs it                      (pmi2)
# For sbatch also: JOB_NAME (last part of RUN_DIR), STEP_LAUNCHER (srun; or mpiexec), MAX_RESTARTS
# and LOST_STARTS (see job.sh), SAVE_SECONDS (longest step and a save, by which Slurm's warning comes
# 60 + 2 x SAVE_SECONDS before the limit; 120, but at most a quarter of the limit).
# In a Slurm allocation the run is asked to save and leave that long before it ends.
# Exits with the run's own code (docs/fault-tolerance.md), which torchrun and srun would lose.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=slurm.sh
source "$repo/scripts/slurm.sh"

# A request to leave that comes before there is a run to hand it on to.
trap 'say "left while it started; the same command begins again"; exit 75' TERM USR1
trap 'exit 130' INT

dry_run=false
asked_of_sbatch=()
while (($#)); do
  case $1 in
    --dry-run) dry_run=true ;;
    -h | --help)
      show_help "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *)
      require_sbatch_flag "$1" "${asked_of_sbatch[@]: -1}"
      asked_of_sbatch+=("$1")
      ;;
  esac
  shift
done
flags=("$@")

asked_launcher=${LAUNCHER:-}
load_site # may set defaults of everything above
# A machine's way to submit is no way to start what was submitted.
if [[ -z $asked_launcher && ${LAUNCHER:-} == sbatch && -n ${SLURM_JOB_ID:-} ]]; then LAUNCHER=srun; fi

choose_python

ranks_known=true
if [[ -z ${RANKS_PER_NODE:-} ]]; then
  RANKS_PER_NODE=$(count_gpus)
  ((RANKS_PER_NODE)) || RANKS_PER_NODE=1 ranks_known=false
fi
NODES=${NODES:-1}
for variable in NODES RANKS_PER_NODE CPUS_PER_TASK SAVE_SECONDS LOST_STARTS; do
  [[ -z ${!variable:-} ]] || require_count "$variable" "${!variable}"
done
threads='[1-9][0-9]{0,5}'
[[ -z ${OMP_NUM_THREADS:-} || $OMP_NUM_THREADS =~ ^$threads(,$threads)*$ ]] ||
  refuse "OMP_NUM_THREADS=$OMP_NUM_THREADS: must be a whole number, 1 or more; or unset it"
[[ ${MAX_RESTARTS:-0} =~ ^[0-9]{1,6}$ ]] || refuse "MAX_RESTARTS=$MAX_RESTARTS: must be a whole number"
world=$((NODES * RANKS_PER_NODE))

# A flag wins over the environment. The launcher must know the folder, for the exit code, and the
# configuration, for the script and the name of the folder; what only prints starts no rank.
given=("${flags[@]}") flags=() only_prints=false
for ((i = 0; i < ${#given[@]}; i++)); do
  case ${given[i]} in
    --run-dir=*) RUN_DIR=${given[i]#*=} ;;
    --run-dir) RUN_DIR=${given[i + 1]:-} ;;
    --config=*)
      CONFIG=${given[i]#*=}
      continue
      ;;
    --config)
      if ((i + 1 < ${#given[@]})); then
        CONFIG=${given[++i]}
        continue
      fi
      ;;
    --dry-run=true | --dry-run=false)
      dry_run=${given[i]#*=}
      continue
      ;;
    --dry-run)
      dry_run=true
      case ${given[i + 1]:-} in true | false) dry_run=${given[++i]} ;; esac
      continue
      ;;
    -h | --help | --help-compat) only_prints=true ;;
  esac
  flags+=("${given[i]}")
done

entry=${ENTRY:-}
if [[ -z $entry ]]; then
  entry=pretrain_gpt.py first_line=
  [[ -z ${CONFIG:-} || ! -f $CONFIG ]] || IFS= read -r first_line <"$CONFIG" || true
  [[ ! $first_line =~ ^#.*(pretrain_[a-z0-9_]+\.py) ]] || entry=${BASH_REMATCH[1]}
fi
[[ -f $repo/$entry ]] || refuse "ENTRY=$entry: no such script in $repo"
if $only_prints; then exec "$PYTHON" "$repo/$entry" "${flags[@]}"; fi

if [[ -z ${RUN_DIR:-} ]]; then
  name=$(basename "${entry#pretrain_}" .py)
  [[ -z ${CONFIG:-} ]] || name=$(basename "$CONFIG" .yaml)
  RUN_DIR=runs/$name
fi
while [[ $RUN_DIR == ?*/ ]]; do RUN_DIR=${RUN_DIR%/}; done
[[ ${RUN_DIR##*/} =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
  refuse "RUN_DIR=$RUN_DIR: the last part may hold letters, digits, . _ - and must not begin with . or -"

default=local
((world == 1)) || default=torchrun
LAUNCHER=${LAUNCHER:-$default}
((${#asked_of_sbatch[@]} == 0)) || [[ $LAUNCHER == sbatch ]] ||
  refuse "${asked_of_sbatch[0]}: only LAUNCHER=sbatch takes flags here; those of $entry come after --"
limit=
if [[ $LAUNCHER == sbatch ]]; then TIME=${TIME:-60}; fi
if [[ -n ${TIME:-} ]]; then
  limit=$(seconds_of "$TIME")
  [[ -n $limit && $limit != 0 ]] || refuse "TIME=$TIME: must be a time such as 90 (minutes), 12:00:00 or 1-12:00:00"
fi

program=("${PROGRAM:-$repo/$entry}")
[[ -z ${CONFIG:-} ]] || program+=(--config "$CONFIG")
[[ -z ${GRAD_PATH:-} ]] || program+=(--grad-path "$GRAD_PATH")
program+=(--run-dir "$RUN_DIR" "${flags[@]}")

# The cores that srun gives to each rank; nothing where nobody says.
cores_of_srun() { echo "${SLURM_CPUS_PER_TASK:-${CPUS_PER_TASK:-}}"; }

# Threads of a rank: its cores, or its share of the cores of this node. Nothing where srun brings an
# allocation of its own and the ranks alone will see how many cores it has.
threads_of_rank() {
  local cores threads=
  if [[ $LAUNCHER == srun ]]; then
    threads=$(cores_of_srun)
    [[ -n $threads || -n ${SLURM_JOB_ID:-} ]] || return 0
  fi
  if [[ -z $threads ]]; then
    cores=$(nproc)
    # Where Slurm binds no process to cores, those of other jobs are seen too.
    if [[ ${SLURM_CPUS_ON_NODE:-} =~ ^[0-9]{1,6}$ ]] && ((SLURM_CPUS_ON_NODE < cores)); then
      cores=$SLURM_CPUS_ON_NODE
    fi
    threads=$((cores / RANKS_PER_NODE))
  fi
  echo "$((threads > 1 ? threads : 1))"
}

# Sets `command`, which starts every rank with srun.
command_of_srun() {
  local lead
  $dry_run || command -v srun >/dev/null || refuse "LAUNCHER=srun: srun not found; Slurm is not installed here"
  # Without the first two, srun waits for the whole run after a rank has died.
  command=(srun --kill-on-bad-exit=1 --wait=60 --nodes "$NODES" --ntasks "$world"
    --ntasks-per-node "$RANKS_PER_NODE")
  # srun does not inherit the allocation's value from Slurm 22.05 on.
  local cores
  cores=$(cores_of_srun)
  [[ -z $cores ]] || command+=(--cpus-per-task "$cores")
  # For a step that brings its own allocation, which nobody else would tell of its end.
  if [[ -n $limit && -z ${SLURM_JOB_ID:-} ]]; then
    lead=$(lead_seconds "$limit")
    command+=(--time "$TIME" --signal "USR1@$lead")
  fi
  # A job that was submitted with --export=NONE hands the same to srun (SLURM_EXPORT_ENV), and ranks
  # would lack what is exported here.
  [[ " ${srun_flags[*]}" == *" --export"* ]] || command+=(--export=ALL)
  [[ -z ${LOG_DIR:-} ]] || command+=(--output "$LOG_DIR/%x-%j-%t.log" --open-mode=append)
  # Without it every rank would be the only one for MPI.
  if $needs_mpi && [[ " ${srun_flags[*]}" != *" --mpi"* ]]; then
    $dry_run || require_mpi_plugin "${SLURM_MPI_TYPE:-pmi2}"
    command+=("--mpi=${SLURM_MPI_TYPE:-pmi2}")
  fi
  command+=("${srun_flags[@]}" "$PYTHON" "${program[@]}")
  # srun itself ends the ranks at once when it is told to end.
  hand_on() {
    if [[ $1 == INT ]] && ${interrupted:-false}; then
      kill -TERM "$2" 2>/dev/null || true
    else
      [[ $1 != INT ]] || interrupted=true
      kill -USR1 "$2" 2>/dev/null || true
    fi
  }
}

# Makes a temporary folder in which files can be locked, as those of a parallel file system may not.
folder_with_locks() {
  local folder
  folder=$(mktemp -d)
  if command -v flock >/dev/null && ! flock --nonblock "$folder" true; then
    rmdir "$folder"
    folder=$(mktemp -d -p /dev/shm)
  fi
  echo "$folder"
}

command_of_torchrun() {
  # torchrun kills itself on USR1 unless told to hand it on.
  command=("$PYTHON" -m torch.distributed.run --max-restarts 0
    --signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE")
  # At each start torchrun makes a folder for logs, by default in TMPDIR, and leaves it there.
  if ! $dry_run; then
    torchrun_files=$(folder_with_locks)
    trap 'rm -rf "$torchrun_files"' EXIT
    command+=(--log-dir "$torchrun_files")
  fi
  unset LAUNCH_MEETING
  if ((NODES == 1)); then
    # torchrun's own store listens on every interface and unpickles what it is sent. On one machine a
    # file does, which a sign of life each day instead of each 5 seconds keeps small; and rank 0
    # leaves the port at which it listens on loopback in LAUNCH_MEETING. 127.0.0.1 since a machine's
    # own name need not resolve.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    command+=(--rdzv-backend c10d --rdzv-conf "store_type=file,keep_alive_interval=86400"
      --local-addr 127.0.0.1)
    if ! $dry_run; then
      command+=(--rdzv-endpoint "$torchrun_files/agent")
      export LAUNCH_MEETING=$torchrun_files/port
    fi
  else
    [[ ${RENDEZVOUS:-} == ?*:?* ]] ||
      refuse "LAUNCHER=torchrun NODES=$NODES: set RENDEZVOUS=host:port, alike on every node"
    command+=(--rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_DIR##*/}")
  fi
  command+=("${program[@]}")
  # torchrun itself kills its ranks 30 seconds after a signal, saved or not.
  hand_on() { pkill "-$1" -P "$2" 2>/dev/null || kill "-$1" "$2" 2>/dev/null || true; }
}

command_of_mpiexec() {
  local mpiexec=${MPIEXEC:-} shell=()
  if [[ -z $mpiexec ]]; then
    mpiexec=$(dirname "$(command -v "$PYTHON")")/mpiexec
    [[ -x $mpiexec ]] || mpiexec=mpiexec
  fi
  $dry_run || command -v "$mpiexec" >/dev/null ||
    refuse "LAUNCHER=mpiexec: $mpiexec not found; run: pip install 'sparsetron[mpi]'"
  # Without a word on it, a node gets as many ranks as it has slots, or all of them.
  case $("$mpiexec" --version 2>/dev/null || true) in
    HYDRA*)
      # MPICH's kills every rank the moment one is lost, before they could tell which it was; they
      # leave by themselves, with a word. A signal that ended one it must not even see.
      mpiexec_flags=(-ppn "$RANKS_PER_NODE" -disable-auto-cleanup "${mpiexec_flags[@]}")
      # shellcheck disable=SC2016 # for that shell to expand
      shell=(sh -c 'trap : HUP INT USR1 TERM; "$@"; exit $?' rank)
      ;;
    *'Open MPI'* | *OpenRTE*)
      # Two ways to map would be refused.
      [[ " ${mpiexec_flags[*]}" == *" --map-by"* ]] ||
        mpiexec_flags=(--map-by "ppr:$RANKS_PER_NODE:node" "${mpiexec_flags[@]}")
      ;;
  esac
  command=("$mpiexec" -n "$world" "${mpiexec_flags[@]}" "${shell[@]}" "$PYTHON" "${program[@]}")
}

torchrun_files=
case $LAUNCHER in
  local) ((world == 1)) || refuse "LAUNCHER=local: starts one rank, not $world; use torchrun, srun or mpiexec" ;;
  torchrun | srun | mpiexec) ;;
  sbatch) prepare_job ;;
  *) refuse "LAUNCHER=$LAUNCHER: must be local, torchrun, srun, mpiexec or sbatch" ;;
esac

# A wrong setting is told here, once, with its own exit code and before any rank is started.
resolved=
if [[ -z ${PROGRAM:-} ]]; then
  # Ranks that srun starts may find another Python by this name, in a container.
  packages=(numpy yaml)
  [[ $LAUNCHER == srun || $LAUNCHER == sbatch ]] || packages+=(torch safetensors tqdm)
  require_packages "${packages[@]}"
  resolved=$(RANK=0 WORLD_SIZE=$world LOCAL_RANK=0 "$PYTHON" "${program[@]}" --dry-run) || exit
fi
needs_mpi=false
[[ $resolved != *'pipeline_schedule: "message-driven"'* &&
  $resolved != *'pipeline_schedule: message-driven'* ]] || needs_mpi=true

if [[ $LAUNCHER == sbatch ]]; then
  submit_job "${sbatch_flags[@]}" "${asked_of_sbatch[@]}"
  exit 0
fi

OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_of_rank)}
if [[ -n $OMP_NUM_THREADS ]]; then export OMP_NUM_THREADS; else unset OMP_NUM_THREADS; fi
if [[ $LAUNCHER == srun || $LAUNCHER == mpiexec ]]; then
  export PYTHONUNBUFFERED=1 # a rank's log shows its last words even if it is killed
  # Ranks on some of the job's nodes find the first of these by themselves: it need not be the job's.
  if [[ -n ${SLURM_JOB_ID:-} && -z ${MASTER_ADDR:-} && ${SLURM_JOB_NUM_NODES:-$NODES} == "$NODES" ]] &&
    ((NODES > 1)) && ! $dry_run; then
    MASTER_ADDR=$(master_address)
    if [[ -n $MASTER_ADDR ]]; then export MASTER_ADDR; else unset MASTER_ADDR; fi
  fi
fi
case $LAUNCHER in
  local)
    command=("$PYTHON" "${program[@]}")
    # In a shell that srun gave several tasks, the process would wait for the ranks that they are not.
    [[ ${SLURM_STEP_NUM_TASKS:-1} == 1 ]] || unset SLURM_STEP_NUM_TASKS PMI_RANK PMI_SIZE
    ;;
  torchrun) command_of_torchrun ;;
  srun) command_of_srun ;;
  mpiexec) command_of_mpiexec ;;
esac

say "$LAUNCHER, $NODES node(s) x $RANKS_PER_NODE rank(s)," \
  "${OMP_NUM_THREADS:-as many as cores} thread(s) each, run folder $RUN_DIR"
printf -v line '%q ' "${command[@]}"
if $dry_run; then
  printf '#!/usr/bin/env bash\nset -euo pipefail\ncd %q\n' "$PWD"
  if ((${#modules[@]})); then
    printf 'source %q\nload_modules' "$repo/scripts/common.sh"
    printf ' %q' "${modules[@]}"
    echo
  fi
  [[ -z ${OMP_NUM_THREADS:-} ]] || printf 'export OMP_NUM_THREADS=%q\n' "$OMP_NUM_THREADS"
  [[ -z ${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-} ]] ||
    printf 'export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=%q\n' "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
  printf 'exec %s\n' "${line% }"
  exit 0
fi
say "${line% }"

if [[ -n ${SLURM_JOB_ID:-} ]]; then
  beside() { watch_time_limit "$1"; }
fi
began=$(mktemp)
LAUNCH_REPORT=$(mktemp)
export LAUNCH_REPORT
trap 'rm -rf "$began" "$LAUNCH_REPORT" ${torchrun_files:+"$torchrun_files"}' EXIT
run_to_the_end "${command[@]}"

# torchrun turns every code into 1, srun and mpiexec some into 137: status.json has the true one. A
# run that never said there how it ended was cut short, whatever code its processes left with.
recorded=
if [[ $RUN_DIR/status.json -nt $began ]]; then
  export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
  recorded=$("$PYTHON" -m megatron.fault_tolerance.root_cause "$RUN_DIR" 2>/dev/null) || recorded=
  # A run whose ranks are ended after that, as in the drawing of its report, ended as it says.
  if [[ -n $recorded ]] && { ((code)) || [[ $recorded == 6 ]]; }; then code=$recorded; fi
  # Last of all, since torchrun buries it under its own traceback, and calls a run that was told to
  # leave and saved a failed one.
  if ((code)) && [[ $LAUNCHER != local || $recorded == 6 || $code == 75 ]]; then
    "$PYTHON" - "$RUN_DIR" >&2 <<'PY' || true
import sys
from megatron.status import read_status

status = read_status(sys.argv[1])
if status is not None and status.state == "failed":
    print(f"launch.sh: {status.place}: {' '.join(status.reason.split())}")
if status is not None and status.state == "left" and status.iteration:
    print(f"launch.sh: saved step {status.iteration} ({status.left}); the same command resumes the run")
PY
  fi
fi
# Of a run that did not begin the ranks say why, the first cause before what followed from it.
if [[ -z $recorded && -s $LAUNCH_REPORT ]] && ((code)); then
  said=$(grep -m 1 -v '^\(6\|75\) ' "$LAUNCH_REPORT") || said=$(grep -m 1 '^6 ' "$LAUNCH_REPORT") ||
    said=$(head -n 1 "$LAUNCH_REPORT")
  # A rank that crashed without a word makes the launcher tell the others to leave.
  [[ $said != 75* || ($NODES == 1 && $(grep -c . "$LAUNCH_REPORT") == "$RANKS_PER_NODE") ]] ||
    said="$code "
  code=${said%% *}
  [[ $LAUNCHER == local || -z ${said#* } ]] || say "${said#* }"
fi
# A process dies of a request to leave until it listens, and torchrun calls that a failure.
if [[ -z $recorded && $code != 0 ]] && ! grep -q -v '^\(6\|75\|130\) ' "$LAUNCH_REPORT"; then
  case $asked in
    INT) code=130 ;;
    TERM | USR1) code=75 ;;
  esac
fi
exit "$code"
