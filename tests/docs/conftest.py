"""A reader's machine for the tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.translation_data import made_up_pairs
from tests.docs.documents import REPO
from tests.docs.shell import Shell
from tests.docs.wheelhouse import build_wheelhouse
from tests.slurm.conftest import DAEMONS
from tests.slurm.harness import Cluster

WORDS = "the meaning of a word is its use in the language and not much else".split()


def clone(folder: Path) -> None:
    """Copy the repository as it is here, without files that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def write_own_files(folder: Path) -> None:
    """Write the reader's own files: a corpus, a book, GPT-2's vocabulary, tasks, sentence pairs."""
    texts = [" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) for i in range(2000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    (folder / "mybook.txt").write_text("\n\n".join(texts))
    (folder / "lambada.jsonl").write_text("".join(lines.splitlines(keepends=True)[:5]))
    pair = {"paradigm": "order", "phenomenon": "islands", "good": "It is.", "bad": "Is it."}
    (folder / "blimp.jsonl").write_text(json.dumps(pair) + "\n")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "lambada_openai.jsonl").write_text((folder / "lambada.jsonl").read_text())
    asked = {
        "premise": texts[0],
        "choice1": "So.",
        "choice2": "No.",
        "question": "cause",
        "label": 0,
    }
    (folder / "tasks" / "copa.jsonl").write_text(json.dumps(asked) + "\n")
    # GPT-2's letters for the 256 bytes: the printable bytes stand for themselves.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, shown), *(chr(256 + i) for i in range(256 - len(shown)))]
    vocabulary = {token: i for i, token in enumerate([*letters, "th", "<|endoftext|>"])}
    (folder / "encoder.json").write_text(json.dumps(vocabulary))
    (folder / "vocab.bpe").write_text("#version: 0.2\nt h\n")
    pairs = made_up_pairs(400)
    (folder / "train.en").write_text("".join(f"{english}\n" for english, _ in pairs))
    (folder / "train.de").write_text("".join(f"{german}\n" for _, german in pairs))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster | None]:
    """Start the Slurm cluster, if this machine can run one."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if os.geteuid() != 0 or not all(shutil.which(name, path=path) for name in DAEMONS):
        yield None
        return
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def shell(slurm: Cluster | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Start the shell of a reader who has Python, a fresh clone and no network.

    pip finds wheels of the packages of the tests' environment, in jobs too.
    """
    folder = tmp_path_factory.mktemp("reader")
    for name in ("notes", "bin", "wheels", "scratch", "home"):
        (folder / name).mkdir()
    build_wheelhouse(
        folder / "wheels", links=folder / "links", constraints=REPO / "constraints.txt"
    )
    for name in ("clone", "cluster"):
        clone(folder / name)
    write_own_files(folder / "clone")
    (folder / "bin" / "python3").symlink_to(Path(sys._base_executable).resolve())  # pyright: ignore[reportAttributeAccessIssue]
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(folder / "home"),
        "LANG": "C.UTF-8",
        "READER": str(folder),
        "SCRATCH": str(folder / "scratch"),
        "OMP_NUM_THREADS": "1",
        # Settings that replace a network.
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder / "wheels"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    if slurm is not None:
        environment["SLURM_CONF"] = str(slurm.folder / "slurm.conf")
    shell = Shell(folder / "clone", notes=folder / "notes", environment=environment)
    yield shell
    shell.close()
