#!/usr/bin/env bash
# A Slurm of four nodes on this machine, whose jobs run for real. As root; Debian's packages are
# slurmctld, slurmd, slurm-client and munge.
#   cluster.sh start FOLDER PORT SECONDS   controller at PORT, nodes at the four ports after it
#   cluster.sh stop FOLDER                 ends what start began, and nothing else
# The start fails with exit code 98 (EADDRINUSE) if another program has one of the ports, and with 1
# if the nodes do not come up within so many seconds.
# Everything lies in FOLDER, also the daemons' key; SLURM_CONF=FOLDER/slurm.conf chooses it. Node
# names are known to Slurm alone, as they are behind some clusters' front ends.
set -euo pipefail
verb=${1:?start or stop} folder=${2:?a folder}
PATH=$PATH:/usr/sbin:/sbin

stop() {
  local file pid signal pids=()
  for file in "$folder"/{slurmd-node{0..3},slurmctld,munged}.pid; do
    if pid=$(cat "$file" 2>/dev/null); then pids+=("$pid"); fi
  done
  for signal in TERM KILL; do
    kill "-$signal" "${pids[@]}" 2>/dev/null || return 0
    for _ in {1..50}; do
      kill -0 "${pids[@]}" 2>/dev/null || break
      sleep 0.1
    done
  done
}

start() {
  local port=${1:?a port} seconds=${2:?seconds} host node
  host=$(hostname)
  mkdir -p "$folder/state"
  # Munge wants a folder that nobody else can write to, and none that hides its socket.
  chmod 755 "$folder"
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
  cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
KillWait=10
MinJobAge=600
PartitionName=all Nodes=node[0-3] Default=YES MaxTime=INFINITE State=UP
CONF
  for node in {0..3}; do
    echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1 + node)) CPUs=16"
  done >>"$folder/slurm.conf"
  export SLURM_CONF=$folder/slurm.conf
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
    --seed-file="$folder/munged.seed" 2>"$folder/munged.err"
  slurmctld -c
  for node in {0..3}; do slurmd -N "node$node"; done
  for ((SECONDS = 0; SECONDS < seconds; )); do
    if [[ $(sinfo -h -N -o %T 2>/dev/null) == $'idle\nidle\nidle\nidle' ]]; then return; fi
    if grep -qs 'Address already in use' "$folder"/slurm*.log; then
      echo "cluster.sh: a port from $port to $((port + 4)) is in use" >&2
      return 98
    fi
    sleep 0.2
  done
  echo "cluster.sh: the nodes did not come up; see $folder/*.log" >&2
  return 1
}

case $verb in
  start) start "${3:-}" "${4:-}" ;;
  stop) stop ;;
  *)
    echo "cluster.sh: $verb: start or stop" >&2
    exit 2
    ;;
esac
