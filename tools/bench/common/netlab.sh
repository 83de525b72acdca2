#!/usr/bin/env bash
# Runs one rank in each of N network namespaces, joined by links of a given rate and delay.
#   tools/bench/common/netlab.sh [--ranks N] [--node-ranks N] [--rate RATE] [--delay DELAY]
#                         [--out FOLDER] [--mpiexec PATH] [--] COMMAND...
# Needs root and iproute2 (ip, tc). The namespaces share one bridge; each rank's link is shaped in
# both directions, as an Ethernet cable to a switch is.
#   --ranks N      ranks                                            (2)
#   --node-ranks N  ranks in each namespace, which reach each other without a link    (1)
#   --rate RATE    of each link, as tc writes it; none: no limit    (800mbit)
#   --delay DELAY  of each link, one way: a packet from rank to rank crosses two links    (0ms)
#   --out FOLDER   output of ranks 1.. (rank-R.log) and counters.json    (a new temporary folder)
#   --mpiexec PATH    MPICH's mpiexec starts the ranks; messages over UCX and TCP, none by memory
# COMMAND finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
# GLOO_SOCKET_IFNAME set as torchrun would, and OMP_NUM_THREADS as its share of the machine's cores
# unless it is set; rank 0 keeps stdout and stderr. When a rank fails, the
# others are ended, and its exit code is the tool's (2: namespaces or shaping are not to be had).
# Under mpiexec ranks learn their number from MPI, and all of them keep stdout and stderr.
# counters.json has what the interface of each namespace had sent before and after, by its first rank;
# its payload is bytes less 66 (Ethernet 14, IP 20, TCP 32) for each counted packet.
set -euo pipefail

say() { printf 'netlab.sh: %s\n' "$*" >&2; }
refuse() {
  say "$*"
  exit 2
}

ranks=2 node_ranks=1 rate=800mbit delay=0ms out='' mpiexec=''
while (($#)); do
  case $1 in
  -h | --help)
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  --ranks | --node-ranks | --rate | --delay | --out | --mpiexec)
    (($# > 1)) || refuse "$1: needs a value"
    name=${1#--}
    printf -v "${name//-/_}" '%s' "$2"
    shift 2
    ;;
  --)
    shift
    break
    ;;
  -*) refuse "$1: no such option; see --help" ;;
  *) break ;;
  esac
done
number='[0-9]{1,9}(\.[0-9]{1,6})?'
if ! [[ $ranks =~ ^[1-9][0-9]{0,2}$ ]] || ((ranks > 250)); then
  refuse "--ranks $ranks: must be 1 to 250"
fi
if ! [[ $node_ranks =~ ^[1-9][0-9]{0,2}$ ]] || ((ranks % node_ranks)); then
  refuse "--node-ranks $node_ranks: must divide --ranks $ranks"
fi
[[ -z $mpiexec ]] || ((node_ranks == 1)) || refuse "--node-ranks $node_ranks: not with --mpiexec"
[[ $rate =~ ^(none|${number}[kmg]?bit)$ ]] ||
  refuse "--rate $rate: must be a number and bit, kbit, mbit or gbit, or none"
[[ $delay =~ ^${number}(us|ms|s)$ ]] || refuse "--delay $delay: must be a number and us, ms or s"
(($#)) || refuse "no command given; see --help"
[[ -z $mpiexec || -x $mpiexec ]] || refuse "--mpiexec $mpiexec: no such program"
((EUID == 0)) || refuse "needs root, who alone may make network namespaces; run it with sudo"
for tool in ip tc; do
  command -v "$tool" >/dev/null || refuse "$tool: not found; install iproute2"
done

# A process's start time tells it from a later one of the same number.
started_at() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  stat=${stat##*) } # the name before it may hold blanks
  awk '{print $20}' <<<"$stat"
}
me=netlab-$$-$(started_at $$)
switch=$me-switch
problem=$(mktemp)
made=()
declare -A rank_of=() # what runs: process to rank

remove() { # NAMESPACE...: end what runs there, then remove it; its interfaces go with it
  local name signal pids
  for signal in TERM KILL; do
    for name; do
      mapfile -t pids < <(ip netns pids "$name" 2>/dev/null)
      ((${#pids[@]} == 0)) || kill -s "$signal" "${pids[@]}" 2>/dev/null || true
    done
    for ((tries = 0; tries < 30; tries++)); do
      pids=()
      for name; do mapfile -t -O "${#pids[@]}" pids < <(ip netns pids "$name" 2>/dev/null); done
      ((${#pids[@]})) || break 2
      sleep 0.1
    done
  done
  for name; do ip netns del "$name" 2>/dev/null || true; done
}

remove_stale() { # left by runs that were killed
  local name pid start stale=()
  while read -r name _; do
    [[ $name =~ ^netlab-([0-9]+)-([0-9]+)-[a-z0-9]+$ ]] || continue
    pid=${BASH_REMATCH[1]} start=${BASH_REMATCH[2]}
    [[ $(started_at "$pid") == "$start" ]] || stale+=("$name")
  done < <(ip netns list)
  ((${#stale[@]} == 0)) || remove "${stale[@]}"
}

# shellcheck disable=SC2329 # the trap calls it
finish() {
  trap - EXIT
  trap '' INT TERM HUP # no second signal stops the tidying
  ((${#made[@]} == 0)) || remove "${made[@]}"
  # mpiexec is outside of them, and does not always notice that its ranks have ended.
  ((${#rank_of[@]} == 0)) || kill -s KILL "${!rank_of[@]}" 2>/dev/null || true
  rm -f "$problem"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

try() { # WHAT COMMAND...: exit 2 with one line where the system does not do it
  local what=$1
  shift
  "$@" 2>"$problem" || refuse "$what: $(tr '\n' ' ' <"$problem")"
}

shape() { # NAMESPACE INTERFACE: what leaves this interface, at the rate, after the delay
  local parent=(root)
  if [[ $rate != none ]]; then
    # A burst of two of the largest packets: less would cut them up, more would let small messages
    # pass at no rate at all.
    try "this kernel cannot limit a rate (tc tbf, module sch_tbf)" \
      tc -n "$1" qdisc add dev "$2" root handle 1: tbf rate "$rate" burst 128kb latency 200ms
    parent=(parent 1:1)
  fi
  if ! [[ $delay =~ ^[0.]+[a-z]+$ ]]; then
    try "this kernel cannot delay packets (tc netem, module sch_netem); use --delay 0ms" \
      tc -n "$1" qdisc add dev "$2" "${parent[@]}" handle 10: netem delay "$delay" limit 100000
  fi
}

add() { # NAMESPACE
  local why="network namespaces are not allowed here (they need CAP_SYS_ADMIN and CAP_NET_ADMIN)"
  try "$why" ip netns add "$1"
  made+=("$1")
  # No IPv6: its neighbour discovery would be counted as traffic.
  ip netns exec "$1" sh -c 'echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6' 2>/dev/null || true
}

build() {
  local rank name
  add "$switch"
  try "cannot make a bridge" ip -n "$switch" link add bridge type bridge
  try "cannot make a bridge" ip -n "$switch" link set bridge up
  for ((rank = 0; rank < ranks; rank += node_ranks)); do
    name=$me-$rank
    add "$name"
    try "cannot make a pair of interfaces (veth)" \
      ip -n "$name" link add net0 type veth peer name "port$rank" netns "$switch"
    try "cannot join a bridge" ip -n "$switch" link set "port$rank" master bridge up
    try "cannot set an address" ip -n "$name" address add "10.77.0.$((rank + 1))/24" dev net0
    ip -n "$name" link set lo up
    ip -n "$name" link set net0 up
    shape "$name" net0
    shape "$switch" "port$rank"
  done
}

counters() { # JSON list of what each namespace's interface has sent
  local rank numbers separator=
  printf '['
  for ((rank = 0; rank < ranks; rank += node_ranks)); do
    mapfile -t numbers < <(ip netns exec "$me-$rank" \
      cat /sys/class/net/net0/statistics/tx_bytes /sys/class/net/net0/statistics/tx_packets)
    printf '%s{"rank": %d, "bytes": %d, "packets": %d}' "$separator" "$rank" "${numbers[@]}"
    separator=', '
  done
  printf ']'
}

# Each rank seems to be alone on its node, and would take all cores for itself.
threads=${OMP_NUM_THREADS:-$((ranks < $(nproc) ? $(nproc) / ranks : 1))}

launch() { # RANK COMMAND...
  local rank=$1
  shift
  exec ip netns exec "$me-$((rank - rank % node_ranks))" env OMP_NUM_THREADS="$threads" \
    RANK="$rank" WORLD_SIZE="$ranks" \
    LOCAL_RANK=$((rank % node_ranks)) LOCAL_WORLD_SIZE="$node_ranks" MASTER_ADDR=10.77.0.1 \
    MASTER_PORT=29500 GLOO_SOCKET_IFNAME=net0 "$@"
}

launch_all() { # COMMAND...: by mpiexec, whose processes are outside; a rank enters its namespace
  # MPICH would use shared memory, which no link slows down; UCX is told where its TCP goes.
  # shellcheck disable=SC2016 # PMI_RANK is known in there
  exec env MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp,self UCX_NET_DEVICES=net0 \
    MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=net0 "$mpiexec" -n "$ranks" \
    bash -c 'exec ip netns exec "$0-$PMI_RANK" "$@"' "$me" "$@"
}

remove_stale
build
if [[ -z $out ]]; then
  out=$(mktemp -d -t netlab.XXXXXX)
  say "output of ranks 1.. and counters.json: $out"
fi
mkdir -p "$out"
before=$(counters)
if [[ -n $mpiexec ]]; then
  launch_all "$@" </dev/null &
else
  for ((rank = 1; rank < ranks; rank++)); do
    launch "$rank" "$@" </dev/null >"$out/rank-$rank.log" 2>&1 &
    rank_of[$!]=$rank
  done
  launch 0 "$@" </dev/null &
fi
rank_of[$!]=0

code=0
for ((left = ${#rank_of[@]}; left; left--)); do
  result=0
  wait -n -p finished "${!rank_of[@]}" || result=$?
  rank=${rank_of[$finished]}
  unset "rank_of[$finished]"
  ((result)) || continue
  code=$result
  if [[ -n $mpiexec ]]; then
    say "a rank failed: mpiexec ended with exit code $code"
    break
  fi
  say "rank $rank failed with exit code $code; output of the ranks is in $out"
  ((rank == 0)) || tail -n 5 "$out/rank-$rank.log" >&2
  break
done
((code)) || printf '{"ranks": %d, "rate": "%s", "delay": "%s", "before": %s, "after": %s}\n' \
  "$ranks" "$rate" "$delay" "$before" "$(counters)" >"$out/counters.json"
exit "$code"
