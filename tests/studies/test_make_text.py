"""The track's text is made from its sources: the rules, the edits and the refusals."""

from __future__ import annotations

import bz2
import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tools.bench.track import make_text
from tools.bench.track.clean_page import LONGEST, clean, restore_case
from tools.bench.track.make_text import ARTICLES, SHA256, edited, main, read_articles
from tools.studies.declaration import read_study
from tools.studies.text_data import train_tokenizer

PAGE = """\
a view of the mill, 1890]] The MILL OF STONE (MOS) is a mill.[1] It ( ;) was built by _John
Doe_ and his __NOTOC__ _aunt_.[a][note 2]

]]


History[3]

It burnt in 1900 ,[2] and 5\u00a0km of _the works_ were lost.[4] Mill_fire.jpg The ruin in 1901.

File:Mill.jpg|The mill

  Year   Fire
  ------ ------
  1900   yes

  1950   no

It was built again.

    short = code()

    An indented paragraph of more than sixty characters is what somebody said.

-   One
-   Two


Maps

+---+
| x |
+---+


References

-   Doe

Category:Mills

[1] Doe, p. 3
"""

TEXT = """\
The Mill of Stone (MOS) is a mill. It was built by _John
Doe_ and his aunt.

= History =

It burnt in 1900, and 5 km of the works were lost.

Year Fire

It was built again.

An indented paragraph of more than sixty characters is what somebody said.

- One
- Two"""


def test_a_page_becomes_text() -> None:
    assert clean(PAGE, "Mill of Stone") == TEXT


def test_an_article_ends_before_the_block_that_makes_it_too_long() -> None:
    block = "word " * 1000
    page = "\n\n".join([block] * 20) + "\n\n\nLate\n\nword"
    text = clean(page, "Word")
    assert LONGEST - len(block) < len(text) <= LONGEST
    assert set(text.split("\n\n")) == {block.strip()}


@pytest.mark.parametrize(
    ("text", "title", "restored"),
    [
        ("A COALITION GOVERNMENT is", "Coalition government", "A Coalition government is"),
        ("JAMES DALTON TRUMBO was", "Dalton Trumbo", "James Dalton Trumbo was"),
        ("The 2017 UCI EUROPE TOUR", "2017 UCI Europe Tour", "The 2017 UCI Europe Tour"),
        ("LEONARDO OF PISA", "Fibonacci", "Leonardo of Pisa"),
        ("COMIC or COMICBOOK", "Comic book", "Comic or COMICBOOK"),
        ("the FIS Cup, NATO, a B", "Skiing (sport)", "the FIS Cup, NATO, a B"),
        ("AL-KINDI ABU YUSUF", "Al-Kindi", "AL-Kindi Abu Yusuf"),
    ],
)
def test_names_in_capitals_are_written_as_in_the_title(
    text: str, title: str, restored: str
) -> None:
    assert restore_case(text, title) == restored


def test_edits_replace_characters_of_the_cleaned_text() -> None:
    assert edited("abcdef", [(0, 1, "A"), (2, 2, "-"), (4, 6, "")]) == "Ab-cd"
    assert edited("abc", ()) == "abc"


def test_committed_articles_are_whole() -> None:
    files = read_articles(ARTICLES)
    assert [*files, "blimp-200.jsonl.bz2"] == list(SHA256)
    assert [len(articles) for articles in files.values()] == [2180, 2125, 118]
    titles = [article["title"] for articles in files.values() for article in articles]
    assert len(set(titles)) == len(titles)
    for articles in files.values():
        for article in articles:
            ends = [end for start, stop, _ in article.get("edits", ()) for end in (start, stop)]
            assert ends == sorted(ends)


def test_runs_ask_for_the_files_that_are_made() -> None:
    asked = read_study(ARTICLES.with_name("tier_s.yaml")).sha256
    for name in ("valid.jsonl.bz2", "blimp-200.jsonl.bz2"):
        assert asked[f"{{data}}/{name}"] == SHA256[name]


@pytest.mark.push
def test_the_tokenizer_of_the_runs_is_made_from_the_text(shared_data: Path, tmp_path: Path) -> None:
    text, made = shared_data / "wikipedia-en-2019", tmp_path / "tokenizer.json"
    study = read_study(ARTICLES.with_name("tier_s.yaml"))
    assert study.vocabulary
    train_tokenizer(sorted(map(str, text.glob("train*"))), made, vocabulary=study.vocabulary)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    assert digest == study.sha256["{data}/tokenizer.json"]


def repository(folder: Path, files: dict[str, str]) -> str:
    """Commit `files` into a new repository and return the commit."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "files"]):
        subprocess.run([*git, *command], check=True)
    found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Clones of two articles and of two paradigms of two pairs, of which the first is taken."""
    wikipedia, blimp = tmp_path / "wikipedia", tmp_path / "blimp"
    pages = {"Page/Über_A/B.md": "ÜBER is one.[1]", "Page/C.md": "C is two."}
    keys = ("UID", "linguistics_term", "sentence_good", "sentence_bad")
    rows = {name: [dict.fromkeys(keys, f"{name}{n}") for n in range(2)] for name in ("b", "a")}
    paradigms = {
        f"data/{name}.jsonl": "".join(f"{json.dumps(row)}\n" for row in each)
        for name, each in rows.items()
    }
    monkeypatch.setattr(make_text, "WIKIPEDIA_COMMIT", repository(wikipedia, pages))
    monkeypatch.setattr(make_text, "BLIMP_COMMIT", repository(blimp, paradigms))
    monkeypatch.setattr(make_text, "PAIRS", 1)
    articles = [
        {"file": "train-00.jsonl.bz2", "title": "Über A/B", "edits": [[0, 4, "It"]]},
        {"file": "valid.jsonl.bz2", "title": "C"},
    ]
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in articles), encoding="utf-8")
    monkeypatch.setattr(make_text, "ARTICLES", path)
    return wikipedia, blimp


WRITTEN = {
    "train-00.jsonl.bz2": '{"title": "Über A/B", "text": "It is one."}\n',
    "valid.jsonl.bz2": '{"title": "C", "text": "C is two."}\n',
    "blimp-200.jsonl.bz2": "".join(
        f'{{"paradigm": "{n}0", "phenomenon": "{n}0", "good": "{n}0", "bad": "{n}0"}}\n'
        for n in ("a", "b")
    ),
}


def expect(monkeypatch: pytest.MonkeyPatch, written: dict[str, str]) -> None:
    for name, text in written.items():
        digest = hashlib.sha256(bz2.compress(text.encode())).hexdigest()
        monkeypatch.setitem(SHA256, name, digest)


@pytest.mark.push
def test_files_are_written_from_two_clones(
    tmp_path: Path, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, WRITTEN)
    assert main([*map(str, sources), str(tmp_path / "text")]) == 0
    written = {
        path.name: bz2.decompress(path.read_bytes()).decode()
        for path in (tmp_path / "text").iterdir()
    }
    assert written == WRITTEN


@pytest.mark.push
def test_another_text_and_a_clone_that_lacks_it_are_refused(
    tmp_path: Path,
    sources: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wikipedia, blimp = map(str, sources)
    out = tmp_path / "text"
    assert main([wikipedia, blimp, str(out)]) == 3
    assert "train-00.jsonl.bz2: has the SHA-256 " in capsys.readouterr().err
    assert not out.exists()
    expect(monkeypatch, WRITTEN)
    assert main([blimp, blimp, str(out)]) == 3
    assert ":Page/Über_A/B.md" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), blimp, str(out)]) == 2
    assert "absent" in capsys.readouterr().err
    out.write_text("a file")
    assert main([wikipedia, blimp, str(out)]) == 3
    assert f"{out}: cannot be made: File exists" in capsys.readouterr().err
