"""Checkpoints: safetensors files and one signed JSON manifest for each step, committed by a rename.

===============  ===============================================================================
`format`         boxes and slices of logical tensors, tensor records, the manifest; strict JSON
`io`             the system calls, in one table, and safetensors files
`writer`         the commit: all ranks together bring a step to disk, or none of it
`reader`         any box of any tensor, put together from mapped slices (numpy)
`verify`         whether a step folder is whole; other programs' checkpoints
`find`           which steps exist, which to keep, which to start from
`store`          `save_checkpoint`, `Checkpoint`, and the bytes that a rank writes (torch)
`state_dict`     the tensors of a run, their names, and the rank that writes each part (torch)
`checkpointer`   saves and restores a run, in the background where asked (torch)
`compatibility`  the settings that a checkpoint and a resumed run must share
===============  ===============================================================================

A save goes through `checkpointer`, `state_dict`, `store`, `writer` and `io`; a load through
`checkpointer`, `state_dict`, `store`, `reader` and `format`. The modules without torch load neither
torch nor the configuration, so that a crash in any system call of a save can be tried out in
milliseconds and a login node can verify. For the same reason this file imports nothing.
"""
