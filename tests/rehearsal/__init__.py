"""A CUDA device and NCCL that the CPU plays, to rehearse the CUDA path where there is no GPU.

torch builds a native tensor of any device around memory that a DLPack capsule describes. A capsule
that says "CUDA" and points to host memory therefore gives real `cuda:0` tensors to a CPU-only build
of torch. That build has no CUDA kernel, so one Python function, registered as the fallback of the
CUDA dispatch key, receives every operation: the function checks the arguments as CUDA would,
records which stream reads and writes which bytes, and computes with the CPU's kernels on the same
memory.

    guard.cpp, guard.py   tell torch that there is CUDA; must be loaded before torch
    findings.py           what was noticed, and which line of the program did it
    streams.py            streams and events with vector clocks: what is ordered before what
    memory.py             memory of the device, pinned memory of the host; races, early frees
    operations.py         every operation on tensors of the device
    flash.py              flash attention over documents of different lengths
    device.py             `install`: all of the above behind `torch.cuda`
    serve.py, process.py  a process with the device, and how tests talk to it
    nccl.py               NCCL over gloo: a stream for each communicator, and a log of all calls
    nccl_log.py           how the logs of all ranks have to fit
    ranks.py              processes with a device each that are the ranks of a grid

Kinds of findings:

    device         tensors of two devices where CUDA refuses them; raises, as CUDA does
    wait           the host waits for the device
    pageable copy  a copy with non_blocking=True whose host memory is not pinned, so the host waits
                   although nobody asked for it; torch's sync debug mode does not see these
    race           two streams touch the same bytes, one writes, and nothing orders the two
    early free     memory is freed while another stream may use it: `record_stream` is missing
    receive ahead  something is issued between an NCCL receive and the wait for it, although the
                   receive may hold up the device until its sender is there

The rehearsal cannot see speed, the rounding of real kernels, real flash attention (attention is
computed by its parts), compiled Triton kernels (the kernels are interpreted), memory pressure, host
code that reads pinned memory too early, and what NCCL does inside: its buffers, its timeouts, its
ways over the network, and an MPI library that reads the device's memory itself. It depends on
internals of torch, so it runs with the tested version of torch only.
"""
