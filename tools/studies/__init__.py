"""Studies: declared sets of runs that are compared by loss, bytes, time and memory.

    declaration   the YAML file of a study, as runs
    commands      the command lines of a run: checkpoints for forks, then the run itself
    rows          the result of a finished run, one JSON line
    execution     runs on this machine; array: runs as a Slurm array; processes: what it starts
    statistics    groups of seeds, standard errors, paired differences, which group beats which
    page          tables, HTML; pictures: losses by cost, gaps with errors

`tools/study.py` is the command. Nothing here imports torch.
"""
