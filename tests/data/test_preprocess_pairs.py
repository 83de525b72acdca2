"""Sentence pairs from archives and files to token files, and what is refused."""

from __future__ import annotations

import json
import unicodedata
import zipfile
from functools import partial
from pathlib import Path

import pytest

from megatron.data.dictionary import EOS, PAD, UNK, Dictionary
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.pair_bpe import PairBPE, train_pair_bpe
from megatron.data.pair_dataset import PairVocabulary
from megatron.data.preprocess_pairs import PairPaths
from megatron.data.raw_pairs import SPLITS, read_tatoeba, read_two_files, sentence_key
from megatron.errors import ConfigError, DataError
from tests.data.translation_data import made_up_pairs, write_archive, write_data
from tools.preprocess_pairs import main


def flags(folder: Path, **changes: str) -> list[str]:
    given = {
        "source-lang": "de",
        "target-lang": "en",
        "output-prefix": str(folder / "x"),
        **changes,
    }
    return [part for name, value in given.items() for part in (f"--{name}", value)]


# ---- BPE and dictionaries ------------------------------------------------------------------------


def test_symbols_join_to_the_lowercased_sentence() -> None:
    texts = ["Das Haus, das grüne (alte) Haus!", "don't -- stop . now", "ÄPFEL"]
    bpe = train_pair_bpe(texts * 3, merges=25)
    assert bpe.merges == 25
    for text, symbols in zip(texts, bpe.split(texts), strict=True):
        assert bpe.join(symbols) == text.lower() == bpe.normalize(text)


def test_merges_are_joint_and_stay_inside_words() -> None:
    bpe = train_pair_bpe(["haus. haus. haus.", "haus! haus!"], merges=100)
    assert bpe.split(["haus.", "haus!"]) == [["▁haus", "."], ["▁haus", "!"]]


def test_the_same_sentences_give_the_same_bpe() -> None:
    texts = [text for pair in made_up_pairs(200) for text in pair]
    one, other = train_pair_bpe(texts, merges=50), train_pair_bpe(texts, merges=50)
    assert one.text == other.text


def test_a_character_never_seen_is_unknown() -> None:
    bpe = train_pair_bpe(["ab ab"], merges=2)
    dictionary = Dictionary.of(bpe.split(["ab ab"]))
    (symbols,) = bpe.split(["ab z"])
    assert dictionary.encode(symbols)[-2:] == [UNK, EOS]


def test_a_dictionary_goes_by_frequency_and_comes_back(tmp_path: Path) -> None:
    made = Dictionary.of([["b", "a", "b"], ["c", "a"], ["<unk>"]])
    assert made.counts == [("a", 2), ("b", 2), ("c", 1)]
    assert len(made) == 8
    made.save(tmp_path / "dict.txt")
    assert (tmp_path / "dict.txt").read_text() == "a 2\nb 2\nc 1\n"
    again = Dictionary.load(tmp_path / "dict.txt")
    assert again.fingerprint() == made.fingerprint()
    ids = again.encode(["c", "a", "new"])
    assert ids == [6, 4, UNK, EOS]
    assert again.decode([PAD, *ids, 4]) == ["c", "a", "<unk>"]


@pytest.mark.parametrize(
    ("content", "line"),
    [("a 2\nb\n", 2), ("a two\n", 1), ("a 1\na 1\n", 1 + 1), ("a 1\n</s> 3\n", 2), ("", 1)],
)
def test_a_bad_dictionary_is_refused_by_line(tmp_path: Path, content: str, line: int) -> None:
    path = tmp_path / "dict.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=f"dict.txt:{line}: "):
        Dictionary.load(path)


def test_a_bad_bpe_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bpe.json"
    for content in ("{}", "not json", '{"model": {"type": "WordLevel"}}'):
        with pytest.raises(DataError, match="bpe.json: not a"):
            PairBPE(content, where=path)


# ---- the tool ------------------------------------------------------------------------------------


def test_splits_share_no_english_sentence_and_keep_every_pair(tmp_path: Path) -> None:
    paths = write_data(tmp_path, longest=2)
    vocabulary = PairVocabulary.load(paths)
    bpe = vocabulary.bpe()
    seen: dict[str, set[str]] = {}
    pairs: list[tuple[str, str]] = []
    for split in SPLITS:
        source, target = (IndexedDataset(paths.tokens(split, lang)) for lang in ("de", "en"))
        texts = [
            (
                bpe.join(vocabulary.target.decode(target[i])),
                bpe.join(vocabulary.source.decode(source[i])),
            )
            for i in range(len(source))
        ]
        pairs += texts
        seen[split] = {english for english, _ in texts}
    assert all(seen.values())
    assert not seen["train"] & seen["valid"] and not seen["train"] & seen["test"]
    assert not seen["valid"] & seen["test"]
    lowered = [(en.lower(), de.lower()) for en, de in made_up_pairs(300, longest=2)]
    # Words of valid and test that training never saw are unknown there.
    known = [pair for pair in pairs if "<unk>" not in f"{pair}"]
    assert len(pairs) == 300 and len(known) > 290
    assert sorted(known) == sorted(pair for pair in lowered if pair in set(known))


def test_twins_in_case_or_unicode_form_stay_together(tmp_path: Path) -> None:
    """Each English sentence occurs in forms that differ in case, composition and sharp s."""
    words = ["über", "Straße", "café", "Ärger", "groß", "naïve"]
    sentences = [f"{a} {b} {c}" for a in words for b in words for c in words]
    forms = (str, str.upper, str.lower, partial(unicodedata.normalize, "NFD"))
    pairs = [
        (form(text), f"{number} {place}")
        for number, text in enumerate(sentences)
        for place, form in enumerate(forms)
    ]
    assert len({english for english, _ in pairs}) > 3 * len(sentences)
    archive = write_archive(tmp_path / "p.zip", pairs)
    given = flags(tmp_path, tatoeba=str(archive), merges="60", split="1,1,1")
    assert main(given) == 0
    paths = PairPaths(str(tmp_path / "x"), "de", "en")
    vocabulary = PairVocabulary.load(paths)
    seen = []
    for split in SPLITS:
        source = IndexedDataset(paths.tokens(split, "de"))
        texts = [PairBPE.join(vocabulary.source.decode(source[i])) for i in range(len(source))]
        seen.append([text.split()[0] for text in texts])
    assert sorted(map(len, seen)) == [4 * len(sentences) // 3] * 3
    assert not set(seen[0]) & set(seen[1]) and not set(seen[0]) & set(seen[2])
    assert not set(seen[1]) & set(seen[2])


def test_keys_hold_apart_what_differs_in_more_than_form() -> None:
    assert sentence_key(" Straße\u0301 ") == sentence_key("STRASSE\u0301")
    assert sentence_key("caf\u00e9") == sentence_key("CAFE\u0301")
    assert len({sentence_key(text) for text in ("cafe", "caf\u00e9", "cafe.", "ca fe")}) == 4


def test_held_back_text_is_kept_for_bleu(tmp_path: Path) -> None:
    paths = write_data(tmp_path)
    lines = paths.text("test", "en").read_text().splitlines()
    data = IndexedDataset(paths.tokens("test", "en"))
    vocabulary = PairVocabulary.load(paths)
    assert len(lines) == len(data)
    assert lines[3] == vocabulary.bpe().join(vocabulary.target.decode(data[3]))


def test_two_files_give_what_an_archive_gives(tmp_path: Path) -> None:
    pairs = made_up_pairs(120)
    archive = write_archive(tmp_path / "pairs.zip", pairs)
    (tmp_path / "a.en").write_text("".join(f"{en}\n" for en, _ in pairs))
    (tmp_path / "a.de").write_text("\r\n".join(de for _, de in pairs))
    found = read_two_files(tmp_path / "a.de", tmp_path / "a.en")
    assert found == read_tatoeba(archive, source_lang="de", target_lang="en")
    files = {"source-file": str(tmp_path / "a.de"), "target-file": str(tmp_path / "a.en")}
    assert main(flags(tmp_path, merges="30", **files)) == 0
    assert (tmp_path / "x.bpe.json").is_file()


def test_the_same_flags_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name)
    files = sorted((tmp_path / "one" / "data").iterdir())
    assert len(files) == 1 + 2 + 3 * 2 * 3 + 2 * 2
    for file in files:
        assert file.read_bytes() == (tmp_path / "other" / "data" / file.name).read_bytes()


def test_long_and_empty_pairs_are_left_out_with_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [*made_up_pairs(60, longest=3), ("the dog " * 30, "der Hund"), ("a cat", " \t"[:1])]
    archive = write_archive(tmp_path / "p.zip", pairs)
    given = flags(tmp_path, tatoeba=str(archive), longest="20", merges="30", split="1,0,0")
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "left out 1 pairs with an empty side" in printed
    assert "left out 1 pairs of more than 20 tokens" in printed
    assert "train 60, valid 0, test 0" in printed
    assert not (tmp_path / "x.valid.de.idx").exists()


def test_old_files_are_replaced_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = write_archive(tmp_path / "p.zip", made_up_pairs(60))
    given = flags(tmp_path, tatoeba=str(archive), merges="30")
    assert main(given) == 0
    assert main(given) == 2
    assert "x.bpe.json exists" in capsys.readouterr().err
    assert main([*given, "--split", "1,0,0", "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p.zip",
        "x.bpe.json",
        "x.de.dict.txt",
        "x.en.dict.txt",
        *(f"x.test.{lang}.txt" for lang in ("de", "en")),
        *(f"x.train.{lang}.{suffix}" for lang in ("de", "en") for suffix in ("bin", "idx", "json")),
        *(f"x.valid.{lang}.txt" for lang in ("de", "en")),
    ]


def test_a_failure_keeps_the_old_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_archive(tmp_path / "p.zip", made_up_pairs(60))
    given = flags(tmp_path, tatoeba=str(archive), merges="30")
    assert main(given) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self: PairBPE, path: Path) -> None:
        raise DataError(f"{path}: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PairBPE, "save", full)  # the file written last
        assert main([*given, "--seed", "7", "--overwrite"]) == 3
    assert main([*given, "--longest", "2", "--overwrite"]) == 3
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "x.bpe.json").unlink()
    (tmp_path / "x.bpe.json").mkdir()
    capsys.readouterr()
    assert main([*given, "--overwrite"]) == 3
    assert "x.bpe.json: is not a regular file" in capsys.readouterr().err
    assert (tmp_path / "x.test.de.bin").read_bytes() == before["x.test.de.bin"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merges": "0"}, "--merges: 0"),
        ({"split": "1,2"}, "split '1,2'"),
        ({"longest": "1"}, "--longest: 1"),
        ({"seed": "-1"}, "--seed: -1"),
        ({"source-lang": "en"}, "--target-lang: en"),
        ({"source-lang": "fr", "target-lang": "de"}, "must be en"),
        ({"source-lang": "../x"}, "--source-lang: '../x'"),
        ({"split-by": "fr"}, "--split-by: 'fr'"),
        ({"source-file": "a.de"}, "--tatoeba: give either"),
        ({"output-prefix": "data/"}, "--output-prefix: 'data/'"),
    ],
)
def test_a_wrong_flag_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], words: str
) -> None:
    archive = write_archive(tmp_path / "p.zip", made_up_pairs(20))
    assert main(flags(tmp_path, tatoeba=str(archive), **changes)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and words in printed


def test_damaged_archives_are_refused_by_name(tmp_path: Path) -> None:
    def refused(content: bytes | None, words: str) -> None:
        path = tmp_path / "bad.zip"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=words) as error:
            read_tatoeba(path, source_lang="de", target_lang="en")
        assert "bad.zip" in str(error.value)

    def packed(**members: bytes) -> bytes:
        with zipfile.ZipFile(tmp_path / "made.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(f"{name}.txt", content)
        return (tmp_path / "made.zip").read_bytes()

    good = packed(deu=b"Hello there.\tHallo du.\n" * 50)
    refused(None, "no such file")
    refused(b"no archive", "cannot be unpacked")
    refused(good[: len(good) // 2], "cannot be unpacked")
    broken = bytearray(good)
    broken[60] ^= 0xFF
    refused(bytes(broken), "cannot be unpacked")
    refused(packed(deu=b"a\tb\n", fra=b"a\tb\n"), "holds 2 files of pairs")
    refused(packed(deu=b"one\n"), r"deu.txt:1: 1 columns, 'one'")
    refused(packed(deu=b"a\tb\na\tb\tc\td\n"), r"deu.txt:2: 4 columns")
    refused(packed(deu=b"a\tb\nx\t\xff\n"), r"deu.txt:2: not UTF-8")
    refused(packed(deu=b"\n\n"), "holds no line")


def test_files_of_other_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    with pytest.raises(DataError, match="2 lines, but .*b has 1"):
        read_two_files(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_bytes(b"eins\n\xff\n")
    with pytest.raises(DataError, match="b:2: not UTF-8"):
        read_two_files(tmp_path / "a", tmp_path / "b")


def test_no_pair_to_train_on_is_refused(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "p.zip", [("", "x")] * 3)
    assert main(flags(tmp_path, tatoeba=str(archive))) == 3
    archive = write_archive(tmp_path / "p.zip", made_up_pairs(20))
    assert main(flags(tmp_path, tatoeba=str(archive), longest="2", merges="5")) == 3


def test_merges_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="--merges: 2000000"):
        train_pair_bpe(["a"], merges=2_000_000)


def test_tatoebas_archive_is_read(shared_data: Path) -> None:
    archive = shared_data / "tatoeba-de-en" / "deu-eng.zip"
    found = read_tatoeba(archive, source_lang="de", target_lang="en")
    assert len(found.pairs) == 169_813 and found.empty == 0
    assert (found.pairs[0].source, found.pairs[0].target) == ("Hallo!", "Hi.")


def test_sidecars_name_the_vocabulary(tmp_path: Path) -> None:
    paths = write_data(tmp_path)
    described = json.loads(Path(f"{paths.tokens('train', 'de')}.json").read_text())["tokenizer"]
    vocabulary = PairVocabulary.load(paths)
    assert described["vocab_size"] == len(vocabulary.source)
    assert described["eod"] == EOS
