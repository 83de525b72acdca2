"""Tasks that `tools/evaluate.py` and `tools/zero_shot.py` score a model on.

example        one line of a task: endings, each after its context, and the right one
figures        accuracies, perplexity and F1 with their standard errors
scoring        log-likelihoods of the endings by the model of a run
task           a task: the reader of its lines, and its figures
readers        lines of LAMBADA, multiple choice and BLiMP
zero_shot      the tasks of the Radius paper's tables 4 to 6, worded as in lm-evaluation-harness
record         ReCoRD's credit for a predicted entity
bits_per_byte  the bits that a model needs for each byte of a text
harness        the tables by lm-evaluation-harness, on an exported model and local files
"""
