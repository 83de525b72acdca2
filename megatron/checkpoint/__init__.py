"""Checkpoints: safetensors files and one signed JSON manifest per step, committed by a rename.

==============  ================================================================================
`strict`        reading JSON with nothing taken on trust
`tensors`       where each entry of a logical tensor is stored: slices, bits, masks, scopes
`manifest`      what a step consists of; the strict reader and writer of `manifest.json`
`tensorfile`    the safetensors layout: hashed while it is written, checked while it is read
`regions`       boxes and flat ranges of a row-major tensor
`files`         the system calls, in one table, and what is built from them
`verify`        whether a step folder is whole; what else a path may be
`commit`        how all ranks together bring a step to disk, or none of it
`locate`        which step to start from
`keep`          which steps make room for newer ones
`background`    a save that is written while training goes on
`reader`        any box of any tensor, put together from mapped slices (numpy)
`shards`        what a rank writes of each tensor, and the bytes of it (torch)
`store`         what a trainer uses: `save_checkpoint`, `Checkpoint`, and `Shard` again (torch)
==============  ================================================================================

All but the last two work without torch, so that a crash in any system call of a save can be tried
out in milliseconds and a login node can verify. That is why nothing is imported here.
"""
