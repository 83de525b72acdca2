"""Tests of ranks in network namespaces: environment, rate limit, byte counters, cleanup."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench.common.netlab import SCRIPT, InterfaceCounters, Network, why_not

pytestmark = pytest.mark.push

ALL_REDUCE = """
import sys, time
import torch, torch.distributed as dist
from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes
dist.init_process_group("gloo")
values, bytes_sent = torch.ones(1 << 19), 0
dist.all_reduce(values)
began = time.perf_counter()
for _ in range(4):
    dist.all_reduce(values)
seconds = time.perf_counter() - began
sent = ring_all_reduce_bytes(values.nbytes, dist.get_world_size())
print(5 * sent, 4 * sent / seconds)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def allowed() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if (reason := why_not(Network(ranks=1, rate="100mbit"))) is not None:
        pytest.skip(reason)


def _run(*arguments: str | Path, **options: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | options
    )


def _left_by(pid: int) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [name for name in names.stdout.split() if name.startswith(f"netlab-{pid}-")]


def _started(*arguments: str) -> subprocess.Popen[str]:
    """Start a run whose ranks sleep, and return once all ranks sleep."""
    ranks = ["bash", "-c", "echo asleep; exec sleep 600"]
    # env resets the signals that the parent process ignores, as under nohup, to their defaults.
    command = ["env", "--default-signal", str(SCRIPT), *arguments, "--", *ranks]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "asleep\n"
    return process


def test_interfaces_count_what_all_reduces_send_at_the_rate(allowed: None, tmp_path: Path) -> None:
    program = tmp_path / "all reduce.py"
    program.write_text(ALL_REDUCE)
    root = str(SCRIPT.parents[2])
    found = _run(
        *("--ranks", "2", "--rate", "200mbit", "--out", tmp_path / "out"),
        *("--", sys.executable, program),
        PYTHONPATH=root,
        TORCH_CPP_LOG_LEVEL="ERROR",  # gloo's sockets have no host names in a namespace.
    )
    assert found.returncode == 0, found.stderr
    sent, rate = map(float, found.stdout.split())
    assert (tmp_path / "out" / "rank-1.log").read_text().split()[0] == str(int(sent))
    # The payload is 95 % of 25 MB/s; a burst passes at once, and a busy machine only lowers the
    # rate.
    assert rate < 25.5e6
    counters = json.loads((tmp_path / "out" / "counters.json").read_text())
    for before, after in zip(counters["before"], counters["after"], strict=True):
        wires = [
            InterfaceCounters(bytes=each["bytes"], packets=each["packets"])
            for each in (before, after)
        ]
        assert wires[1].payload_since(wires[0]) == pytest.approx(sent, rel=0.03)


def test_ranks_are_told_where_they_are_and_arguments_arrive_as_given(
    allowed: None, tmp_path: Path
) -> None:
    odd = "two words; $(touch canary) 'quoted'"
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT'
    show += ' $GLOO_SOCKET_IFNAME"; printf "%s\\n" "$@"; ls /sys/class/net'
    folder = tmp_path / "a folder"
    found = _run("--ranks", "3", "--rate", "none", "--out", folder, "bash", "-c", show, "-", odd)
    told = "{} 3 0 1 10.77.0.1:29500 net0\n" + odd + "\nlo\nnet0\n"
    assert (found.returncode, found.stdout) == (0, told.format(0))
    assert (folder / "rank-2.log").read_text() == told.format(2)
    assert not Path("canary").exists()


def test_ranks_of_a_node_share_a_namespace_and_its_link(allowed: None, tmp_path: Path) -> None:
    show = (
        'echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE"; hostname -I 2>/dev/null || ip -4 -br address'
    )
    nodes = ("--ranks", "4", "--node-ranks", "2", "--rate", "none")
    found = _run(*nodes, "--out", tmp_path, "--", "bash", "-c", show)
    assert found.returncode == 0, found.stderr
    outputs = [found.stdout, *((tmp_path / f"rank-{n}.log").read_text() for n in (1, 2, 3))]
    assert [text.splitlines()[0] for text in outputs] == ["0 0 2", "1 1 2", "2 0 2", "3 1 2"]
    addresses = ["10.77.0.1", "10.77.0.1", "10.77.0.3", "10.77.0.3"]
    assert all(a in text for a, text in zip(addresses, outputs, strict=True)), outputs
    counters = json.loads((tmp_path / "counters.json").read_text())
    assert [each["rank"] for each in counters["after"]] == [0, 2]


@pytest.mark.parametrize("count", ["0", "3", "two"])
def test_nodes_of_unequal_ranks_are_refused(count: str) -> None:
    found = _run("--ranks", "4", "--node-ranks", count, "--", "true")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"netlab.sh: --node-ranks {count}: must divide --ranks 4\n"


def test_the_first_failure_ends_all_ranks_and_is_the_exit_code(
    allowed: None, tmp_path: Path
) -> None:
    program = 'if [ "$RANK" = 1 ]; then echo why >&2; exit 7; fi; exec sleep 600'
    began = time.monotonic()
    found = _run("--out", tmp_path, "--", "bash", "-c", program)
    assert found.returncode == 7 and time.monotonic() - began < 60
    assert "rank 1 failed with exit code 7" in found.stderr
    assert found.stderr.endswith("why\n")


def test_a_command_that_is_not_there(allowed: None, tmp_path: Path) -> None:
    found = _run("--out", tmp_path, "--", "no-such-command")
    assert found.returncode == 127


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_tidies_up(allowed: None, tmp_path: Path, sent: signal.Signals) -> None:
    process = _started("--out", str(tmp_path))
    assert len(_left_by(process.pid)) == 3  # two ranks and the switch
    process.send_signal(sent)
    assert process.wait(timeout=60) == 128 + sent
    assert process.stdout is not None
    process.stdout.close()
    assert _left_by(process.pid) == []


def test_runs_do_not_collide_and_what_a_killed_one_leaves_goes_with_the_next(
    allowed: None, tmp_path: Path
) -> None:
    killed = _started("--out", str(tmp_path / "1"))
    lives = _started("--out", str(tmp_path / "2"))
    try:
        killed.kill()
        killed.wait()
        assert len(_left_by(killed.pid)) == 3
        assert _run("--ranks", "1", "--out", tmp_path / "3", "true").returncode == 0
        assert _left_by(killed.pid) == []
        assert len(_left_by(lives.pid)) == 3 and lives.poll() is None
    finally:
        lives.terminate()
        lives.wait(timeout=60)
        for process in (killed, lives):
            assert process.stdout is not None
            process.stdout.close()
    assert _left_by(lives.pid) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0", "true"], "--ranks 0"),
        (["--ranks", "2; id", "true"], "--ranks 2; id"),
        (["--ranks", "251", "true"], "--ranks 251"),
        (["--rate", "800", "true"], "--rate 800"),
        (["--rate", "1mbit latency 1ms", "true"], "--rate 1mbit"),
        (["--delay", "fast", "true"], "--delay fast"),
        (["--delay"], "--delay: needs a value"),
        (["--speed", "1"], "--speed: no such option"),
        ([], "no command"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str], said: str) -> None:
    found = _run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("netlab.sh: ") and found.stderr.count("\n") == 1
    assert said in found.stderr


def _refusal(command: list[str], **options: object) -> str:
    """Return the refusal of the script, which is read from stdin as its file may be unreadable."""
    script = SCRIPT.read_text(encoding="utf-8")
    found = subprocess.run(
        [*command, "bash", "-s", "--", "true"],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        **options,  # pyright: ignore[reportArgumentType, reportCallIssue]
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1
    return found.stderr


def test_other_users_are_told_that_it_needs_root() -> None:
    options = {"user": 65534} if os.geteuid() == 0 else {}
    assert "needs root" in _refusal([], **options)


def test_missing_tools_are_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("others than root are refused before")
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bash").symlink_to(bash)
    assert "ip: not found; install iproute2" in _refusal([], env={"PATH": str(tmp_path)})


def test_root_without_capabilities_is_told_so() -> None:
    if os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("ip")):
        pytest.skip("needs root to give up, setpriv and iproute2")
    said = _refusal(["setpriv", "--bounding-set", "-sys_admin,-net_admin"])
    assert "network namespaces are not allowed here" in said


def test_shellcheck_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; it comes with the dev extra")
    found = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
