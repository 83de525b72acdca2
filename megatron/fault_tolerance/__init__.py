"""Fault tolerance: heartbeats of ranks, a watchdog, requests to leave, first causes of failures.

    heartbeat      step, phase and latest collectives of every rank, readable by the other ranks
    watchdog       ends a rank that hangs or whose peers are gone; replaces aborts of C++ libraries
    exit_signals   signals and files by which people and launchers ask a run to save or leave
    desync         finds the rank that issued another collective than its peers
    root_cause     the first cause of a failure, also of a run that could not report it
    failures       reports the first cause once and sets the exit code
    consistency    refuses ranks that were started differently, before step 1
    replicas       compares data-parallel copies of the weights bit by bit
    loss_spikes    detects losses far above the recent ones
    run_lock       allows one run at a time in a run folder

docs/fault-tolerance.md lists every fault with its exit code and its test.
"""
