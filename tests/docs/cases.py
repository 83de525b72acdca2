"""Shortened commands, and stand-ins for a reader's files, machine and cluster.

Every command of the documents runs as written unless it is listed here, in document order. A slow
command that is not listed fails at the time limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.limits import LIMIT

TOY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
"""Flags of a model whose step takes milliseconds."""
LASTING = "--micro-batch-size 1 --global-batch-size 2 --train-iters 100000 --log-interval 2"
FEW = "--micro-batch-size 1 --global-batch-size 4 --train-iters 5 --eval-iters 1"
BRIEF = f"{TOY} {FEW}"
COMMAND_LIMIT = 2 * LIMIT
"""Seconds that a command may take: the first one makes an environment and trains in it."""


@dataclass(frozen=True, kw_only=True)
class PageCase:
    """A replacement for a command of the documents.

    `typed` is the line to run; {} in it stands for the command, in which `instead` is replaced
    first. `slurm`: the command needs the tests' Slurm.
    """

    typed: str = "{}"
    instead: Mapping[str, str] = field(default_factory=dict)
    slurm: bool = False

    def of(self, command: str) -> str:
        """Return the line to type for a command."""
        for old, new in self.instead.items():
            assert old in command, f"{old} is not in: {command}"
            command = command.replace(old, new)
        return self.typed.replace("{}", command)


PRELUDE = """\
running() {  # run folder, lines of its metrics there are already
  until (($(grep -sc lm_loss "$1/metrics.jsonl") > $2 + 2)); do sleep 0.2; done
}
ended() { while [[ -n $(squeue -h -j "$1" 2>/dev/null) ]]; do sleep 0.2; done; }
says() { grep -F -- "$2" "$1" || { cat "$1"; return 1; }; }
"""
"""Shell functions that the cases use."""

CASES: dict[str, PageCase] = {
    # ---- two commands ------------------------------------------------------------------------
    # The vocabulary of 0.4 MB of text is as large as the vocabulary of all 8 MB.
    "scripts/quickstart.sh": PageCase(
        typed=f"STEPS=4 CORPUS_BYTES=400000 {{}} {TOY} --eval-iters 1"
    ),
    "STEPS=2000 scripts/quickstart.sh": PageCase(
        typed=f"RANKS=1 {{}} {TOY} --eval-iters 1", instead={"STEPS=2000": "STEPS=6"}
    ),
    "scripts/test.sh": PageCase(typed="LINT=0 WORKERS=0 {} tests/test_layers.py"),
    # ---- gradient paths, parallelism -----------------------------------------------------------
    "CONFIG=configs/gpt_tiny.yaml RANKS_PER_NODE=2 scripts/launch.sh": PageCase(
        typed=f"{{}} {BRIEF}"
    ),
    "for path in 'dense": PageCase(instead={"--train-iters 100": BRIEF}),
    "python tools/prune_checkpoint.py RUN": PageCase(instead={"RUN": "runs/quickstart/dense"}),
    "python -m torch.distributed.run": PageCase(typed=f"{{}} {BRIEF} --train-iters 6"),
    "python tools/parity.py": PageCase(
        typed="{} --paths dense", instead={"--tp 2 --pp 2": "--pp 2"}
    ),
    "CONFIG=configs/gpt_tiny.yaml LAUNCHER=mpiexec": PageCase(
        typed=f"{{}} {FEW}",
        instead={
            "RANKS_PER_NODE=4": "RANKS_PER_NODE=2",
            "--pipeline-model-parallel-size 4": "--pipeline-model-parallel-size 2",
        },
    ),
    # ---- own data and model --------------------------------------------------------------------
    "python tools/train_tokenizer.py": PageCase(instead={"--vocab-size 4096": "--vocab-size 270"}),
    "CONFIG=configs/gpt_tiny.yaml RANKS_PER_NODE=2 RUN_DIR=runs/mybook": PageCase(
        typed=f"{{}} {BRIEF}"
    ),
    "RANKS_PER_NODE=8 scripts/gpt_124m.sh": PageCase(
        typed=f"{{}} {BRIEF}", instead={"RANKS_PER_NODE=8": "RANKS_PER_NODE=1"}
    ),
    "GRAD_PATH=radius RANKS_PER_NODE=8": PageCase(
        typed=f"{{}} {BRIEF} --radius-interval 2",
        instead={"RANKS_PER_NODE=8": "RANKS_PER_NODE=2"},
    ),
    "python tools/generate.py runs/dense": PageCase(typed="{} --max-new-tokens 4"),
    "python pretrain_gpt.py --config start/model.yaml": PageCase(
        typed="{} --global-batch-size 4 --train-iters 2 --eval-iters 1"
    ),
    # ---- translation ---------------------------------------------------------------------------
    "scripts/dc_transformer_de_en.sh": PageCase(
        typed="{} --encoder-layers 1 --decoder-layers 1 --embed-dim 32 --ffn-embed-dim 32 "
        "--encoder-kernel-size-list 3 --decoder-kernel-size-list 3 --train-iters 4 "
        "--save-interval 2 --lr-warmup-iters 2 --max-tokens 400"
    ),
    "python tools/translate.py runs": PageCase(typed="{} --max-len-b 20"),
    # ---- on a Slurm cluster: another clone, to which the wheels were carried ---------------------
    "python3 -m venv .venv": PageCase(
        typed="deactivate; mv wheels $READER/cluster; cp corpus_text_document* $READER/cluster; "
        "cd $READER/cluster; {}"
    ),
    # No Perlmutter can be queried here.
    "SITE=perlmutter": PageCase(typed="cp corpus_text_document* $SCRATCH; SLURM_CONF=/dev/null {}"),
    "LAUNCHER=sbatch": PageCase(
        typed=f"submit() {{ {{}} {TOY} {LASTING}; }}; JOB=$(submit) && running runs/job 0",
        instead={"RANKS_PER_NODE=4": "RANKS_PER_NODE=1"},
        slurm=True,
    ),
    "squeue -j JOB": PageCase(instead={"JOB": "$JOB"}, slurm=True),
    "tail -F RUN/log.txt": PageCase(
        typed="timeout 1 {} | grep 'lm loss'", instead={"RUN": "runs/job"}, slurm=True
    ),
    "python tools/status.py RUN": PageCase(instead={"RUN": "runs/job"}, slurm=True),
    "python tools/report.py RUN": PageCase(instead={"RUN": "runs/job"}, slurm=True),
    "touch RUN/STOP": PageCase(
        typed="{}; ended $JOB; says runs/job/status.json STOP",
        instead={"RUN": "runs/job"},
        slurm=True,
    ),
    # The same command again continues the run, which is then cancelled.
    "scancel JOB": PageCase(
        typed="JOB=$(submit) && running runs/job $(grep -c lm_loss runs/job/metrics.jsonl); "
        "{}; ended $JOB; says runs/job/log.txt 'loaded checkpoint'",
        instead={"JOB": "$JOB"},
        slurm=True,
    ),
    # ---- configuration, stopping ---------------------------------------------------------------
    "python pretrain_gpt.py --config configs/gpt_tiny.yaml": PageCase(typed=f"{{}} {BRIEF}"),
    "touch RUN/SAVE": PageCase(instead={"RUN": "$READER/clone/runs/gpt_tiny"}),
    "pretrain_gpt.py --help": PageCase(typed="python {}"),
    # ---- a task of the reader ------------------------------------------------------------------
    "python pretrain_circle.py": PageCase(instead={"--train-iters 200": "--train-iters 4"}),
    "ENTRY=pretrain_circle.py": PageCase(instead={"--train-iters 200": "--train-iters 4"}),
    # ---- contributing: the first clone again ---------------------------------------------------
    "pip install -e '.[data,log,mpi,dev]'": PageCase(
        typed="deactivate; cd $READER/clone && . .venv/bin/activate && {}"
    ),
    # The clone of the tests was copied, not cloned.
    "python tools/golden.py compare": PageCase(
        typed="git init -q -b main && git add -A && "
        "git -c user.name=reader -c user.email=reader@here commit -qm all && {} --cases 'dense, 1'"
    ),
}
"""Replacements, by the beginning of the command."""

NOT_RUN: dict[str, str] = {
    "pip install 'lm_eval[hf]'": "it brings packages that no other command needs",
    "python -m tools.bench.gpu.ranks": "needs a GPU; see tests/bench/test_gpu_ranks.py",
    "scripts/test.sh --all": "runs every test, the one that types it too",
    "scripts/test.sh --push": "runs every test, the one that types it too",
    "scripts/test.sh --record": "runs every test, the one that types it too",
    "python tools/study.py docs/examples/study.yaml --slurm": "see tests/slurm/test_study.py",
}
"""Reasons why commands are not run, by the beginning of the command."""
