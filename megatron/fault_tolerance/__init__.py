"""What keeps a run honest: each rank's whereabouts, a watchdog, requests to leave, first causes.

heartbeat   where every rank is, readable by the others without asking it
watchdog    ends a rank that hangs, or whose peers are gone, though its main thread is stuck
requests    signals and files by which people and launchers ask a run to save or leave
terminate   the same where a library aborts the process
parting     which rank issued another collective than its peers
failures    the first cause, told once, and the exit code
autopsy     how a run ended that could not say so itself
sameness    ranks that were started differently are refused before step 1
replicas    data-parallel copies are compared bit by bit
spikes      which losses are too far out to learn from
"""
