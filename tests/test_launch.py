"""Tests that ranks are found from torchrun, srun, mpiexec or no launcher; nonsense is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import launch as launch_module
from megatron.errors import ConfigError, PeerError
from megatron.launch import (
    Launch,
    Runtime,
    _join_world,
    check_cuda_variables,
    detect_launch,
    free_port,
    job_environment,
    set_cuda_variables,
)
from tests.config.helpers import read

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "1234",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2", "MASTER_ADDR": "node0",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PIPELINE = ("--pipeline-model-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2")
EAGER = {
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_RUNTIME_CONNECT": "0",
}
FIRST = {"TORCH_NCCL_HIGH_PRIORITY": "1"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ON_FOUR_NODES = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_PROCID": "3"}


def numbers(launch: Launch) -> tuple[str, int, int, int, int]:
    return (
        launch.launcher,
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 3, 8, 1, 2)),
        (SRUN, ("srun", 5, 7, 1, 3)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, ("srun", 5, 7, 1, 4)),
        (MPICH, ("mpiexec", 1, 4, 1, 4)),
        (OPENMPI, ("mpiexec", 2, 4, 0, 2)),
        ({**SRUN, **TORCHRUN}, ("torchrun", 3, 8, 1, 2)),
        # A batch script's own variables do not make it a task of a step.
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, ("none", 0, 1, 0, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **MPICH}, ("mpiexec", 1, 4, 1, 4)),
        # One proxy on each of as many nodes as there are ranks, counted otherwise.
        ({**SRUN, **ON_FOUR_NODES, **MPICH}, ("mpiexec", 1, 4, 1, 4)),
        ({**SRUN, **ON_FOUR_NODES, **OPENMPI}, ("mpiexec", 2, 4, 0, 2)),
        # srun --mpi=pmi2 reports the rank twice.
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, ("srun", 5, 7, 1, 3)),
        ({**MPICH, "PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0"}, ("mpiexec", 1, 4, 0, 4)),
    ],
)
def test_launchers(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert numbers(detect_launch(environ)) == expected


def test_srun_ranks_agree_on_a_meeting_place() -> None:
    launch = detect_launch(SRUN)
    assert (launch.master_addr, launch.master_port) == ("node0", 14930)
    alone = {k: v for k, v in SRUN.items() if k != "MASTER_ADDR"} | {"SLURM_STEP_NUM_NODES": "1"}
    assert detect_launch(alone).master_addr == "127.0.0.1"
    next_job = detect_launch(SRUN | {"SLURM_JOB_ID": "78", "SLURM_STEP_ID": "1"})
    assert next_job.master_port not in (launch.master_port, None)


def test_a_free_port_is_one_that_nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "PORTS", range(12000, 12100))
    held: dict[int, socket.socket] = {}
    with ExitStack() as stack, pytest.raises(ConfigError, match="from 12000 to 12099"):
        while len(held) <= 100:
            port = free_port()
            held[port] = stack.enter_context(socket.create_server(("", port)))
    assert held and held.keys() <= set(range(12000, 12100))


def test_a_rank_of_another_job_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of job 1 listens at the port that job 2 was given too."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "SLURM_JOB_ID": "2"}
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    two = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    launch = detect_launch(SRUN | two | known)
    with pytest.raises(PeerError, match="1 of 2 ranks joined"):
        _join_world(launch, "gloo", timedelta(seconds=1))
    assert not PrefixStore("sparsetron/1/0", store).check(["here/1"])
    assert PrefixStore("sparsetron/2/0", store).check(["here/1"])


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a non-negative integer"),
        ({"RANK": "\u0661", "WORLD_SIZE": "2"}, "must be a non-negative integer"),
        ({"RANK": "\u00b2", "WORLD_SIZE": "2"}, "must be a non-negative integer"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "of at most 18 digits"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "must be from 1 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "must be from 1 to 65535"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 with world size 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 with world size 0"),
    ],
)
def test_nonsense_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launch(environ)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SRUN, **MPICH}, ("SLURM_PROCID=5", "PMI_RANK=1")),
        ({**SRUN, **OPENMPI}, ("SLURM_PROCID=5", "OMPI_COMM_WORLD_RANK=2")),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "1"}, ("SLURM_STEP_NUM_TASKS=7", "PMI_SIZE=1")),
        ({**MPICH, **OPENMPI}, ("OMPI_COMM_WORLD_RANK=2", "PMI_RANK=1")),
        ({**MPICH, "PALS_RANKID": "0"}, ("PALS_RANKID=0", "PMI_RANK=1")),
    ],
)
def test_launchers_that_disagree_are_named(environ: dict[str, str], words: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        detect_launch(environ)
    for word in (*words, "launchers disagree", "--mpi=pmi2", "--mpi=pmix"):
        assert word in str(error.value)


def test_messages_over_mpi_need_a_launcher_of_mpi() -> None:
    """torchrun's ranks, and a process alone, are each rank 0 of 1 for MPI."""
    for environ, how in ((TORCHRUN, "torchrun"), ({}, "no launcher")):
        with pytest.raises(ConfigError, match=f"started by {how}") as error:
            launch_module.require_mpi(detect_launch(environ))
        for word in ("mpiexec -n", "LAUNCHER=mpiexec", "srun --mpi=pmi2"):
            assert word in str(error.value)


def test_another_world_of_mpi_names_the_launchers_flag() -> None:
    launch = detect_launch(SRUN)
    launch_module.check_world(launch, rank=5, size=7)
    for rank, size in ((0, 1), (4, 7)):
        with pytest.raises(ConfigError) as error:
            launch_module.check_world(launch, rank=rank, size=size)
        assert f"rank {rank} of {size}, srun's variables say 5 of 7" in str(error.value)
        assert "--mpi=pmi2" in str(error.value) and "--mpi=pmix" in str(error.value)


def test_an_mpi_for_one_thread_is_refused() -> None:
    launch_module.check_threads(2, 2, "")
    with pytest.raises(ConfigError, match="SomeMPI 1.0 grants thread level 1.*SERIALIZED"):
        launch_module.check_threads(1, 2, "SomeMPI 1.0\nmore")


@pytest.mark.push
def test_a_missing_mpi4py_names_its_extra() -> None:
    """The error is the same where mpi4py is installed but finds no library."""
    code = (
        "import builtins, sys; from megatron.launch import detect_launch;"
        "from megatron.launch import require_mpi\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mpi4py': raise getattr(builtins, sys.argv[1])('no libmpi.so')\n"
        "if sys.argv[1]: sys.meta_path.insert(0, Broken())\n"
        "else: sys.modules['mpi4py'] = None\n"
        "try: require_mpi(detect_launch({'PMI_RANK': '0', 'PMI_SIZE': '2'}))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    for missing in ("", "RuntimeError", "ImportError"):
        answer = subprocess.run(
            [sys.executable, "-c", code, missing], capture_output=True, text=True
        )
        assert answer.stdout.startswith("ConfigError mpi4py"), answer.stderr
        assert "pip install 'sparsetron[mpi]'" in answer.stdout
        assert ("no libmpi.so" in answer.stdout) == bool(missing)


def test_waiting_ends_with_its_limit_or_its_reason() -> None:
    answers = iter([False, False, True])
    assert launch_module.poll(lambda: next(answers), seconds=5)
    assert not launch_module.poll(lambda: False, seconds=0.01)


def test_job_environment_is_an_allow_list() -> None:
    environ = {"SLURM_JOB_ID": "9", "WANDB_API_KEY": "canary", "OMP_NUM_THREADS": "2"}
    assert job_environment(environ) == {"SLURM_JOB_ID": "9", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ((), {}, {}),
        (PIPELINE, {}, EAGER),
        (TENSOR, {}, FIRST),
        (PIPELINE + TENSOR, {}, EAGER | FIRST),
        ((*PIPELINE, "--device", "cuda"), {}, EAGER),
        ((*PIPELINE, *TENSOR, "--device", "cpu"), {}, {}),
        (PIPELINE, {"CUDA_MODULE_LOADING": "LAZY"}, EAGER | {"CUDA_MODULE_LOADING": "LAZY"}),
        (TENSOR, {"TORCH_NCCL_HIGH_PRIORITY": "0"}, {"TORCH_NCCL_HIGH_PRIORITY": "0"}),
    ],
)
def test_cuda_gets_the_variables_of_the_grid(
    flags: tuple[str, ...], before: dict[str, str], after: dict[str, str]
) -> None:
    """Variables that the user has set stay; records show the result."""
    environ = dict(before)
    set_cuda_variables(read(*flags), environ)
    assert environ == after == job_environment(environ)


@pytest.mark.push
def test_a_rank_sets_them_before_torch_or_mpi_is_there() -> None:
    """Either library may load CUDA, which reads its variables once."""
    code = """if True:
        import os, sys
        import megatron.pretrain, pretrain_gpt
        def look(launch, **_):
            print(os.environ["CUDA_MODULE_LOADING"], {"torch", "mpi4py"} & set(sys.modules))
            sys.exit(0)
        megatron.pretrain.require_mpi = look
        pretrain_gpt.main(sys.argv[1:])"""
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1 "
    flags += "--micro-batch-size 1 --train-iters 1 --mock-data --pipeline-schedule message-driven"
    environ = {"RANK": "0", "WORLD_SIZE": "2", "PATH": os.environ["PATH"]}
    line = [sys.executable, "-c", code, *flags.split(), *PIPELINE]
    answer = subprocess.run(line, capture_output=True, text=True, env=environ)
    assert answer.stdout == "EAGER set()\n", answer.stderr


def test_one_hardware_queue_is_told_of_or_refused() -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    stages = ("--num-layers", "4", *PIPELINE)
    interleaved = read(*stages, "--num-layers-per-virtual-pipeline-stage", "1")
    with pytest.raises(ConfigError, match="num_layers_per_virtual_pipeline_stage 1.*; unset"):
        check_cuda_variables(interleaved, one)
    for flags in (stages, TENSOR):
        warning = check_cuda_variables(read(*flags), one)
        assert warning is not None and "CUDA_DEVICE_MAX_CONNECTIONS=1 is kept" in warning
    assert check_cuda_variables(read(), one) is None
    for environ in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        assert check_cuda_variables(interleaved, environ) is None


def test_kernels_that_are_loaded_late_are_refused_for_interleaved_stages() -> None:
    late = {"CUDA_MODULE_LOADING": "lazy"}
    stages = ("--num-layers", "4", *PIPELINE)
    interleaved = read(*stages, "--num-layers-per-virtual-pipeline-stage", "1")
    with pytest.raises(ConfigError, match="CUDA_MODULE_LOADING=lazy with num_layers.*; unset"):
        check_cuda_variables(interleaved, late)
    assert check_cuda_variables(read(*stages), late) is None
    assert check_cuda_variables(interleaved, {"CUDA_MODULE_LOADING": "EAGER"}) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_device_has_hardware_queues(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = ("--num-layers", "4", *PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(launch_module, "_choose_device", lambda *_: torch.device(device))
    launch = Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)
    if device == "cpu":
        assert launch_module.start(launch, read(*stages)).backend == "gloo"
        return
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        launch_module.start(launch, read(*stages))


@pytest.mark.parametrize(
    ("launcher", "seen", "index"),
    [("srun", 1, 0), ("mpiexec", 1, 0), ("torchrun", 1, None), ("torchrun", 2, 1), ("srun", 2, 1)],
)
def test_ranks_of_torchrun_do_not_share_a_device(
    launcher: str, seen: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun and mpiexec may bind a device to each rank, which then sees one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    launch = Launch(launcher=launcher, rank=1, world_size=2, local_rank=1, local_world_size=2)
    if index is not None:
        assert launch_module._choose_device(launch, read()) == torch.device("cuda", index)
        return
    with pytest.raises(ConfigError, match="local rank 1: only 1 CUDA devices are seen"):
        launch_module._choose_device(launch, read())


def test_records_say_what_the_ranks_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(launcher="srun", rank=0, world_size=5, local_rank=0, local_world_size=2)

    def network(backend: str, address: str = "") -> object:
        monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
        facts = Runtime(launch=launch, device=torch.device("cpu"), backend=backend).facts()
        assert (facts["ranks"], facts["nodes"], facts["backend"]) == (5, 3, backend)
        return facts["network"]

    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert network("gloo", "127.0.0.1") == "lo"
    assert network("gloo", "192.0.2.77") == "192.0.2.77"  # a proxy's, of no interface here
    assert network("cpu:gloo,cuda:nccl") == "chosen by NCCL"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert [network("cpu:gloo,cuda:nccl"), network("gloo")] == ["=ib0", "eth1"]


@pytest.mark.parametrize(
    ("built", "visible", "cause"),
    [
        (None, None, "built without CUDA"),
        ("13.0", "0,1", "built for CUDA 13.0, for which the driver may be too old"),
        ("13.0", "NoDevFiles", "the job has asked for no GPU"),  # set by Slurm
        ("13.0", "", None),
        ("13.0", "-1,0", None),
    ],
)
def test_gpus_that_torch_does_not_see_are_told(
    built: str | None, visible: str | None, cause: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch_module, "gpu_devices", lambda: [Path("/dev/nvidia0")])
    told = launch_module.unused_gpus(environ)
    assert (told is None) == (cause is None)
    if told is not None and cause is not None:
        assert cause in told and "--device cuda" in told and "\n" not in told
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launch_module.unused_gpus(environ) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch_module, "gpu_devices", list)
    assert launch_module.unused_gpus(environ) is None


def test_fp32_products_and_convolutions_are_not_rounded_to_tf32() -> None:
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    launch = Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)
    try:
        for backend in backends:
            backend.allow_tf32 = True
        launch_module.start(launch, read())
        assert [backend.allow_tf32 for backend in backends] == [False, False]
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def test_a_rank_has_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for local in (1, 64):
        launch = Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=local)
        launch_module.start(launch, read())
    assert found == [3, 2]


@pytest.mark.push
def test_finding_the_rank_needs_no_torch() -> None:
    code = "import sys; from megatron.launch import detect_launch; detect_launch(); "
    code += "print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "False", answer.stderr
