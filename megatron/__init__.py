"""Sparsetron's training stack. Imports go downward only; a test holds the layers apart.

==  ==========================================================================================
0   `config`, `launch`, `errors`, `status`, `timers`: the settings of a run, its processes and
    devices, its exit codes; `fault_tolerance.run_lock`: one run in a folder;
    `low_memory.checkpoint_interval`: how many layers to recompute as one; `processor`: the
    instruction sets of the CPU, and what they decide; `transfer`: copies to a device;
    `regular_file`: files of a folder that others may write to; `busy`: messages about what takes
    long
1   `parallel`: rank arithmetic (`dims`) apart from process-group handles (`groups`);
    `low_memory.activation_checkpoint`: what is stored and what is recomputed
2   `tensor_parallel`, `data_parallel.bucket`: collectives of layers, and the unit of exchange;
    `pipeline.{schedule,transport}`: what a stage does in which order, how messages travel
3   `model`, `data`, `optimizer`, `low_memory`, `sparse`, `data_parallel`
4   `pipeline` (`stage` computes, `runner` runs its passes), `checkpoint`
5   `checkpoint.{checkpointer,compatibility}`: save, restore, and what a resumed run must share;
    `fault_tolerance`: failures found, named and reported, and requests to leave;
    `training`, `run_dir`, `metrics`, `report`, `profiling`; `preflight`: checks before a start;
    `memory_estimate`: bytes that a rank will hold
6   `tasks`: a model with its data; `pretrain`: builds a run, starts it, ends it
    `low_memory.{planned_memory,dry_run,ledger}`: the memory of a step in three ways
7   `pretrain_gpt.py`, which names the concrete gradient paths, `pretrain_vision.py`,
    `pretrain_translation.py` and `tools/`
==  ==========================================================================================
"""
