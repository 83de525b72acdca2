#!/usr/bin/env bash
# A Slurm of two nodes on this machine, whose jobs run for real. As root; Debian's packages are
# slurmctld, slurmd, slurm-client and munge.
#   cluster.sh start FOLDER PORT   controller at PORT, nodes at the two ports after it
#   cluster.sh stop FOLDER         ends what start began, and nothing else
# Everything lies in FOLDER, also the daemons' key; SLURM_CONF=FOLDER/slurm.conf chooses it. Node
# names are known to Slurm alone, as they are behind some clusters' front ends.
set -euo pipefail
verb=${1:?start or stop} folder=${2:?a folder}
PATH=$PATH:/usr/sbin:/sbin

stop() {
  local name pid
  for name in slurmd-node0 slurmd-node1 slurmctld munged; do
    pid=$(cat "$folder/$name.pid" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || continue
    for _ in {1..50}; do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
  done
}

start() {
  local port=${1:?a port} host node
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
NodeName=node0 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=8 State=UNKNOWN
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=8 State=UNKNOWN
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=INFINITE State=UP
CONF
  export SLURM_CONF=$folder/slurm.conf
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
    --seed-file="$folder/munged.seed" 2>"$folder/munged.err"
  slurmctld -c
  for node in node0 node1; do slurmd -N "$node"; done
  for _ in {1..100}; do
    if [[ $(sinfo -h -N -o %T 2>/dev/null) == $'idle\nidle' ]]; then return; fi
    sleep 0.2
  done
  echo "cluster.sh: the nodes did not come up; see $folder/*.log" >&2
  return 1
}

case $verb in
  start) start "${3:-}" ;;
  stop) stop ;;
  *)
    echo "cluster.sh: $verb: start or stop" >&2
    exit 2
    ;;
esac
