"""Sparsetron's training stack. Imports go downward only; a test holds the layers apart.

==  ==========================================================================================
0   `config`, `launch`, `runtime`, `errors`, `status`, `timers`: what was asked for, where, how it
    fails;
    `run_lock`: one run in a folder; `mpi_world`: MPI beside torch.distributed;
    `low_memory.checkpoint_interval`: how many layers to recompute as one; `processor`: the
    instruction sets of the CPU, and what they decide; `transfer`: copies to a device
1   `parallel`: rank arithmetic (`dims`) apart from process-group handles (`groups`)
2   `tensor_parallel`, `data_parallel.{bucket,interface}`: collectives, and the one swap point;
    `pipeline.{schedule,transport}`: what a stage does in which order, how messages travel
3   `model`, `data`, `optimizer`, `low_memory`, `sparse`,
    `data_parallel.{bucket_plan,buckets,engine,dense,sharded}`
4   `pipeline` (`stage` computes, `runner` brings the three together), `checkpoint`
5   `guards` (failures found, named and told; requests to leave),
    `preflight` and `origin`: what a start needs is looked for before it;
    `training`, `run_state`, `run_tensors`, `run_identity` and `run_folder` (what outlives a run),
    `metrics`, `report`, `profiling`; `memory_estimate`: bytes that a rank will hold
6   `tasks`: a model with its data; `pretrain`: puts a run together
7   `pretrain_gpt.py` and `tools/`, which alone name concrete gradient paths
==  ==========================================================================================
"""
