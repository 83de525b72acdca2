"""Fault tolerance: records of each rank, a watchdog, requests to leave, first causes.

heartbeat     step, phase and latest collectives of every rank, readable by the others
watchdog      ends a rank that hangs or whose peers are gone, and aborts of C++ libraries
exit_signals  signals and files by which people and launchers ask a run to save or leave
desync        the rank that issued another collective than its peers
root_cause    the first cause of a failure, and the end of a run that could not report it
failures      reports the first cause once and sets the exit code
consistency   refuses ranks that were started differently, before step 1
replicas      compares data-parallel copies bit by bit
loss_spikes   losses that are too far out to learn from
run_lock      one run in a folder
"""
