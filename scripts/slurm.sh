# shellcheck shell=bash disable=SC2154,SC2153
# Sourced by launch.sh and job.sh after common.sh: what there is to know of Slurm. What begins with
# "Of launch.sh" works on that script's variables.

# Seconds of Slurm's notation: minutes, minutes:seconds, h:m:s, days-h, days-h:m, days-h:m:s.
# Prints nothing for anything else, such as UNLIMITED.
seconds_of() {
  local text=$1 days=0 parts
  [[ $text =~ ^([0-9]{1,5}-)?[0-9]{1,7}(:[0-9]{1,2}){0,2}$ ]] || return 0
  if [[ $text == *-* ]]; then
    days=${text%%-*} text=${text#*-}
    IFS=: read -ra parts <<<"$text:0:0"
  elif [[ $text == *:*:* ]]; then
    IFS=: read -ra parts <<<"$text"
  else
    IFS=: read -ra parts <<<"0:$text:0"
  fi
  echo $((((10#$days * 24 + 10#${parts[0]}) * 60 + 10#${parts[1]}) * 60 + 10#${parts[2]}))
}

# How long before a limit of so many seconds a run is told to leave: one minute, by which Slurm may
# be early or late, and twice what its longest step and a save take (SAVE_SECONDS). Where nobody
# says how long that is, two minutes, and no more than a quarter of the limit altogether.
lead_seconds() {
  local limit=$1 lead=$((60 + 2 * ${SAVE_SECONDS:-120}))
  if [[ -z ${SAVE_SECONDS:-} ]] && ((lead > limit / 4)); then lead=$((limit / 4)); fi
  echo "$lead"
}

# This job for Slurm's commands. The number of one task of an array is that of the whole array, so
# that a task is named by both numbers.
this_job() {
  if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
    echo "$SLURM_JOB_ID"
  else
    echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  fi
}

# Fields of this job's line in the queue, in squeue's letters (%L time left, %l limit, %T state).
# Fails where Slurm does not answer, as a busy controller now and then does not.
ask_queue() {
  local answer
  answer=$(squeue -h -j "$(this_job)" -o "$1" 2>/dev/null) && [[ -n $answer ]] && echo "${answer%%$'\n'*}"
}

# This job's state in the queue. Slurm is asked for a while: a controller that is busy for a moment
# must not end a chain of days. Nothing where it never answers; to requeue will tell.
job_state() {
  local pause
  for pause in 5 10 20 0; do
    ! ask_queue '%T' || return 0
    sleep "$pause"
  done
}

# The nodes that the next start of this job may not have, once node $1 has lost a rank: that node and
# those excluded before. Nothing, with a word on why, where file $2, which lists those that lost a rank
# before, has $3 already, or where Slurm says that the job could not start on the nodes that remain.
# It says so of a script like the job's own, with all that the user asked for.
nodes_to_exclude() {
  local job nodes said
  job=$(this_job)
  if [[ -f $2 && $(wc -l <"$2") -ge $3 ]]; then
    say "$1 stays allowed: $(paste -sd, "$2") lost ranks before, and no more than LOST_STARTS are excluded"
    return
  fi
  nodes=$(scontrol show job --oneliner "$job" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p') || true
  [[ $nodes != '(null)' ]] || nodes=
  nodes=${nodes:+$nodes,}$1
  if said=$(scontrol write batch_script "$job" - | timeout 60 sbatch --test-only "--exclude=$nodes" 2>&1); then
    echo "$nodes"
  else
    say "$1 stays allowed: Slurm would not start the job without it (${said##*$'\n'})"
  fi
}

# Returns this job to the queue, for a start without the nodes $1, if any. Slurm excludes nodes from
# jobs that wait alone, and ends this script a moment after it has requeued the job.
requeue() {
  local job said
  job=$(this_job)
  trap '' TERM
  if ! scontrol requeue "$job"; then
    say "Slurm refused to requeue; submit the job again${1:+ with --exclude=$1}"
    return 1
  fi
  [[ -z $1 ]] || said=$(scontrol update "JobId=$job" "ExcNodeList=$1" 2>&1) || {
    say "Slurm refused to exclude $1 ($said): the next start may get the same nodes"
    return 1
  }
}

# Sends USR1 to process $1 when it is time to save and leave before the job's end: LEAVE_SECONDS, or
# what the limit makes of them, before it. Slurm is asked again on the way there, since a limit can
# be moved while the job runs. Does nothing for a job without limit.
watch_time_limit() {
  local pid=$1 answer whole left lead nap began=$SECONDS
  while kill -0 "$pid" 2>/dev/null; do
    nap=60
    if answer=$(ask_queue '%l %L'); then
      whole=$(seconds_of "${answer% *}") left=$(seconds_of "${answer#* }")
      [[ -n $whole && -n $left ]] || return 0
      lead=${LEAVE_SECONDS:-$(lead_seconds "$whole")}
      # For tools/status.py.
      [[ -z ${LOG_DIR:-} ]] || date -d "$left seconds" +%s >"$LOG_DIR/end-$SLURM_JOB_ID" || true
      if ((left <= lead)); then
        say "$left s are left of the job: asking the run to save and leave"
        # A process that has just been started would die of the signal, which it does not know yet.
        nap=$((began + 20 - SECONDS))
        ((nap <= 0)) || sleep "$nap"
        hand_on USR1 "$pid"
        return
      fi
      nap=$((left - lead < 1800 ? left - lead : 1800))
    fi
    sleep "$nap"
  done
}

# Where rank 0 will be, for the others: the first node's name, or the address by which Slurm reaches
# it where nobody can resolve the name, or where only that node was asked, which knows its own name
# whatever the others know. Nothing where Slurm does not say; ranks then find out by themselves.
master_address() {
  local first address why
  first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1) || return 0
  address=$(scontrol show node "$first" 2>/dev/null | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p') || true
  if ! getent hosts "$first" >/dev/null 2>&1; then
    why="does not resolve here"
  elif [[ ${SLURMD_NODENAME:-$(hostname -s)} == "$first" && -n $address && $address != "$first" ]]; then
    why="is this node, whose name others may not know"
  else
    echo "$first"
    return
  fi
  [[ -z $address ]] || say "$first $why; ranks meet at its address, $address"
  echo "$address"
}

# Refuses a plugin of srun's, which starts MPI, where srun cannot load it: a name that is listed may
# lack its library. srun says so in five lines.
require_mpi_plugin() {
  local said known
  said=$(srun "--mpi=$1" --test-only true 2>&1) || true
  [[ $said == *'Invalid MPI type'* ]] || return 0
  known=$(srun --mpi=list 2>&1 | sed -n 's/^[[:space:]]\{1,\}\([a-z0-9_]*\)$/\1/p' | sort | paste -sd ' ')
  refuse "srun --mpi=$1: Slurm cannot load that plugin; it lists: $known;" \
    "name another with SLURM_MPI_TYPE, or start with mpiexec (in jobs STEP_LAUNCHER=mpiexec)"
}

# Flags for sbatch or nothing: --name or --name=value, of letters that need no quotes in a header.
# Refuses flags that the header has already, since sbatch would take them in place of those values.
# $2 is the flag before.
require_sbatch_flag() {
  [[ $1 == -* || ${2:-} != --* || $2 == *=* ]] ||
    refuse "$2 $1: flags of sbatch are written $2=$1; those of pretrain_gpt.py come after --"
  [[ $1 =~ ^--[a-z][a-z-]*(=[][A-Za-z0-9_.,:@%+=*/\&\|-]*)?$ ]] ||
    refuse "$1: not a flag of launch.sh or sbatch; flags of pretrain_gpt.py come after --"
  case ${1%%=*} in
    --time) refuse "$1: set TIME instead" ;;
    --nodes) refuse "$1: set NODES instead" ;;
    --ntasks | --ntasks-per-node) refuse "$1: set RANKS_PER_NODE instead" ;;
    --cpus-per-task) refuse "$1: set CPUS_PER_TASK instead" ;;
    --job-name) refuse "$1: set JOB_NAME instead" ;;
    --signal) refuse "$1: set SAVE_SECONDS instead" ;;
    --output | --error) refuse "$1: logs are in logs of the run folder; set RUN_DIR" ;;
    --array) refuse "$1: a job is one run; tools/study.py submits arrays" ;;
  esac
}

# Values of headers that hold a path: sbatch takes ' for a quote, and \ and % for its own marks.
require_header_path() {
  [[ $2 != *[\'\"\\%[:cntrl:]]* ]] ||
    refuse "$1=$2: a path in a job script may not hold quotes, \\, % or control characters"
}

# Of launch.sh: whether the run is told to compute on CPUs, by a flag or in its YAML file.
is_cpu_run() {
  [[ " ${flags[*]} " == *' --device'[\ =]'cpu '* ]] ||
    { [[ -f ${CONFIG:-} ]] && grep -qE '^[[:space:]]*device:[[:space:]]*"?cpu\b' "$CONFIG"; }
}

# Whether Slurm answers and none of its nodes has a GPU to be asked for.
has_no_gpus() {
  local resources
  resources=$(timeout 10 sinfo -h -o %G 2>/dev/null) && [[ -n $resources && $resources != *gpu* ]]
}

# Of launch.sh: sets what a job script is made of besides, and refuses what could do harm in it.
prepare_job() {
  JOB_NAME=${JOB_NAME:-${RUN_DIR##*/}}
  [[ $JOB_NAME =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$ ]] ||
    refuse "JOB_NAME=$JOB_NAME: at most 100 letters, digits, . _ - and not . or - first"
  STEP_LAUNCHER=${STEP_LAUNCHER:-srun}
  [[ $STEP_LAUNCHER == srun || $STEP_LAUNCHER == mpiexec ]] ||
    refuse "STEP_LAUNCHER=$STEP_LAUNCHER: must be srun or mpiexec"
  LEAVE_SECONDS=$(lead_seconds "$limit")
  ((LEAVE_SECONDS < limit)) ||
    refuse "TIME=$TIME: SAVE_SECONDS=$SAVE_SECONDS asks for $LEAVE_SECONDS s at its end, which is all of it"
  require_header_path RUN_DIR "$RUN_DIR"
  if ! is_cpu_run; then
    # Submitted from a login node, all but one GPU of each node would idle, and cost.
    $ranks_known ||
      say "RANKS_PER_NODE is not set and no GPU is seen here: the job starts one rank on each node;" \
        "set RANKS_PER_NODE to the GPUs of a node"
    # Where Slurm hands out GPUs one by one, a job that names none computes on CPUs.
    if [[ $SITE == local && " ${sbatch_flags[*]} ${asked_of_sbatch[*]}" != *' --g'[pr]* ]] &&
      ! has_no_gpus; then
      local gpus=$RANKS_PER_NODE
      $ranks_known || gpus=RANKS_PER_NODE
      say "no flag of sbatch asks for GPUs; if this Slurm wants one: --gpus-per-node=$gpus"
    fi
  fi
  RUN_DIR=$(realpath -ms -- "$RUN_DIR")
  LOG_DIR=$RUN_DIR/logs
  require_header_path RUN_DIR "$RUN_DIR"
  $dry_run || command -v sbatch >/dev/null || refuse "LAUNCHER=sbatch: sbatch not found; Slurm is not installed here"
}

# Of launch.sh: the job script, with flags of sbatch. How ranks are started is not in it: that is
# found out on the nodes, by launch.sh again, at each start of the job.
print_job_script() {
  local variable
  echo '#!/usr/bin/env bash'
  printf '#SBATCH %s\n' "--job-name=$JOB_NAME" "--nodes=$NODES" \
    "--ntasks-per-node=$RANKS_PER_NODE" "--time=$TIME" "--signal=B:USR1@$LEAVE_SECONDS" \
    --requeue --open-mode=append "--output='$LOG_DIR/%x-%j.log'" "--error='$LOG_DIR/%x-%j.log'"
  [[ -z ${CPUS_PER_TASK:-} ]] || echo "#SBATCH --cpus-per-task=$CPUS_PER_TASK"
  (($# == 0)) || printf '#SBATCH %s\n' "$@"
  echo 'set -euo pipefail'
  printf 'cd %q\n' "$PWD"
  # launch.sh would otherwise take TIME for the limit of one step of the job.
  printf 'export LAUNCHER=%q TIME=\n' "$STEP_LAUNCHER"
  for variable in SITE NODES RANKS_PER_NODE PYTHON ENTRY CONFIG GRAD_PATH RUN_DIR LOG_DIR PROGRAM \
    LEAVE_SECONDS MAX_RESTARTS LOST_STARTS OMP_NUM_THREADS MPIEXEC SLURM_MPI_TYPE; do
    [[ -z ${!variable:-} ]] || printf 'export %s=%q\n' "$variable" "${!variable}"
  done
  if ((${#modules[@]})); then
    printf '# job.sh first loads the modules of SITE=%s:' "$SITE"
    printf ' %q' "${modules[@]}"
    echo
  fi
  printf 'exec %q --' "$repo/scripts/job.sh"
  ((${#flags[@]} == 0)) || printf ' %q' "${flags[@]}"
  echo
}

# Of launch.sh: submits the job, with flags of sbatch, and prints its number; --dry-run prints the
# script, and what Slurm would say on stderr. Both make the folder of the job's log.
submit_job() {
  local script job
  script=$(print_job_script "$@")
  say "sbatch, $NODES node(s) x $RANKS_PER_NODE rank(s), run folder $RUN_DIR," \
    "asked to leave $LEAVE_SECONDS s before the limit"
  # Also for a script that is submitted by hand: Slurm makes no folder for a log, and a job that has
  # none dies without a word.
  (umask 027 && mkdir -p "$LOG_DIR" 2>/dev/null) || $dry_run || refuse "$LOG_DIR: cannot be made"
  if $dry_run; then
    printf '%s\n' "$script"
    if [[ -d $LOG_DIR ]]; then
      say "a job that is submitted with this script logs to $LOG_DIR/$JOB_NAME-JOB.log"
    else
      say "$LOG_DIR cannot be made here: make it before the script is submitted, or the job dies"
    fi
    if ! command -v sbatch >/dev/null; then
      say "no sbatch here to ask"
    elif ! timeout 60 sbatch --test-only <<<"$script" >&2; then
      # Without Slurm's word the script may still be right.
      ! timeout 10 scontrol ping >/dev/null 2>&1 || refuse "Slurm would not take this job"
      say "no Slurm controller answers here"
    fi
    return
  fi
  job=$(sbatch --parsable <<<"$script") || exit
  job=${job%%;*}
  say "job $job; the queue: squeue -j $job"
  say "its log: tail -F $(printf '%q %q' "$LOG_DIR/$JOB_NAME-$job.log" "$RUN_DIR/log.txt")"
  say "to end it for good: touch $(printf %q "$RUN_DIR/STOP"), which saves first, or scancel $job"
  echo "$job"
}
