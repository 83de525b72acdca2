"""Checkpoints: safetensors files and one signed JSON manifest per step, committed by a rename.

    format         boxes and slices of logical tensors, tensor records, the manifest; strict JSON
    io             all system calls, in one table, and safetensors files
    writer         the commit: either all ranks' files of a step are saved, or none
    reader         any box of any tensor, assembled from mapped slices (numpy)
    verify         checks of a step folder; recognition of other programs' checkpoints
    shared_verify  the same checks, which all ranks of a run share
    find           the steps of a run: which exist, which to keep, which to start from
    store          `save_checkpoint`, `Checkpoint`, and the bytes that a rank writes (torch)
    state_dict     the tensors of a run, their names, and the rank that writes each part (torch)
    checkpointer   saves and restores a run, also in the background (torch)
    compatibility  the settings that a checkpoint and a resumed run must share

A save goes through `checkpointer`, `state_dict`, `store`, `writer` and `io`; a load through
`checkpointer`, `state_dict`, `store`, `reader` and `format`. Modules not marked torch load neither
torch nor the configuration, so that tests can try a crash at every system call of a save in
milliseconds, and a login node can verify. For the same reason this file imports nothing.
"""
