from __future__ import annotations

import errno
import json
import os
import random
import sys
from pathlib import Path

import pytest

from megatron.data.tokenizer import build_tokenizer, tokenizer_from_sidecar
from megatron.data.train_bpe import train_byte_level_bpe
from megatron.errors import ConfigError, DataError

TRICKY = [
    "",
    " ",
    "\n\n\t \r\n",
    "Hello world",
    " leading and trailing ",
    "tab\tand\x0bcontrol\x01\x7f\x85",
    "naïve café — “quotes” …",
    "中文 日本語 한국어 العربية",
    "👩‍👩‍👧‍👦 🇺🇳 e\u0301 \u200d\u2028\u2029\ufeff",
    "\U0010ffff\ue000",
    "<|endoftext|> is text here, </s> too",
    "x = {'a': [1, 2]}\n\tdef f():  # indented",
    "a" * 5000,
]
TEXT = [
    "the cat sat on the mat and the other cat sat there watching. " * 20,
    "def function(value):\n    return value + other_value\n" * 20,
    "numbers 2024, 2025; pack my box with five dozen jugs of liquor. " * 20,
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tokenizer.json and the same BPE as GPT-2's two files."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    assert train_byte_level_bpe(TEXT, vocab_size=300, output=folder / "tokenizer.json") == 300
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


def gpt2(folder: Path, vocab: str = "vocab.json", merges: str = "merges.txt"):
    return build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(folder / vocab), merge_file=str(folder / merges)
    )


def hugging_face(path: Path):
    return build_tokenizer("HuggingFaceTokenizer", model=str(path))


def random_texts() -> list[str]:
    draw = random.Random(7)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x110000)]
    return [
        "".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(50)) for _ in range(100)
    ]


def test_decoding_undoes_encoding(bpe: Path) -> None:
    for tokenizer in (build_tokenizer("ByteTokenizer"), gpt2(bpe), hugging_face(bpe)):
        for text in TRICKY + random_texts():
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.eod not in ids
            assert all(0 <= id < tokenizer.vocab_size for id in ids)


def test_one_bpe_in_two_formats_gives_the_same_ids(bpe: Path) -> None:
    for text in TRICKY:
        assert gpt2(bpe).encode(text) == hugging_face(bpe / "tokenizer.json").encode(text)


def test_known_ids_of_gpt2(shared_data: Path) -> None:
    tokenizer = gpt2(shared_data / "gpt2-bpe", "encoder.json", "vocab.bpe")
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_of_another_megatron_is_accepted(shared_data: Path) -> None:
    folder = shared_data / "megatron-indexed"
    tokenizer = gpt2(folder, "gpt2-tiny-vocab.json", "gpt2-tiny-merges.txt")
    assert (tokenizer.vocab_size, tokenizer.eod) == (5000, 4999)


def test_sentencepiece(shared_data: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = str(shared_data / "sentencepiece" / "test_model.model")
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", model=path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 2)
    assert tokenizer.decode(tokenizer.encode("I saw a girl")) == "I saw a girl"
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode("a\ud800")
    assert tokenizer_from_sidecar(tokenizer.describe()).encode("a b") == tokenizer.encode("a b")
    marked = build_tokenizer("SentencePieceTokenizer", model=path)
    # <CLS>, <SEP>, <EOD>, <MASK> and <PAD>; the model has pieces that begin and end a sentence.
    assert (marked.vocab_size, marked.eod) == (1005, 1002)
    assert marked.encode("I saw") == tokenizer.encode("I saw")


def train_sentencepiece(folder: Path, **options: object) -> str:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(folder / "m"),
        vocab_size=40,
        model_type="char",
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return str(folder / "m.model")


@pytest.mark.parametrize(
    ("options", "marks", "eod"),
    [
        ({}, 5, 2),  # <PAD> alone is no piece
        ({"pad_id": 3}, 4, 2),
        ({"bos_id": -1, "eos_id": -1}, 7, 2),
        ({"user_defined_symbols": ["<SEP>", "<EOD>"]}, 3, None),
    ],
)
def test_sentencepiece_has_the_marks_of_megatron_after_its_pieces(
    tmp_path: Path, options: dict, marks: int, eod: int | None
) -> None:
    model = train_sentencepiece(tmp_path, **options)
    sentencepiece = pytest.importorskip("sentencepiece")
    inner = sentencepiece.SentencePieceProcessor(model_file=model)
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=model)
    assert tokenizer.vocab_size == len(inner) + marks
    assert tokenizer.eod == (inner.PieceToId("<EOD>") if eod is None else len(inner) + eod)
    ids = tokenizer.encode("the cat")
    assert ids == inner.EncodeAsIds("the cat")
    assert tokenizer.decode([*ids, *range(len(inner), tokenizer.vocab_size)]) == "the cat"


def test_data_of_the_sentencepiece_tokenizer_of_earlier_versions_name_its_new_type(
    tmp_path: Path,
) -> None:
    plain = build_tokenizer("GPTSentencePieceTokenizer", model=train_sentencepiece(tmp_path))
    earlier = {**plain.describe(), "type": "SentencePieceTokenizer"}
    with pytest.raises(DataError, match="of earlier versions is GPTSentencePieceTokenizer now"):
        tokenizer_from_sidecar(earlier)


def test_llama_2_begins_each_text_as_megatron_does(shared_data: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = str(shared_data / "sentencepiece" / "test_model.model")
    plain = build_tokenizer("GPTSentencePieceTokenizer", model=path)
    llama = build_tokenizer("Llama2Tokenizer", model=path)
    assert (llama.vocab_size, llama.eod) == (plain.vocab_size, plain.eod)
    for text in ("I saw a girl", " two  spaces", ""):
        assert llama.encode(text) == [1, *plain.encode(text)]
        assert llama.decode(llama.encode(text)) == plain.decode(plain.encode(text))
    assert llama.fingerprint() != plain.fingerprint()
    again = tokenizer_from_sidecar(json.loads(json.dumps(llama.describe())))
    assert again.encode("a b") == llama.encode("a b")
    with pytest.raises(DataError, match="not the tokenizer that made the data"):
        tokenizer_from_sidecar({**llama.describe(), "type": "GPTSentencePieceTokenizer"})


def test_llama_2_refuses_a_model_without_a_begin_piece(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path, bos_id=-1)
    assert build_tokenizer("GPTSentencePieceTokenizer", model=model).encode("cat")
    with pytest.raises(DataError, match="no begin-of-sentence piece.*GPTSentencePieceTokenizer"):
        build_tokenizer("Llama2Tokenizer", model=model)


def test_gpt_sentencepiece_refuses_a_model_without_an_end_piece(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no end-of-sentence piece"):
        build_tokenizer("GPTSentencePieceTokenizer", model=train_sentencepiece(tmp_path, eos_id=-1))


def test_sentencepiece_refuses_other_files(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "x.model"))


def test_a_sentencepiece_model_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentencepiece")

    def denied(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (tmp_path / "x.model").write_bytes(b"a model")
    monkeypatch.setattr(Path, "read_bytes", denied)
    for kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        with pytest.raises(DataError, match="x.model: cannot be read: Permission denied"):
            build_tokenizer(kind, model=str(tmp_path / "x.model"))


def test_null_tokenizer_counts_as_megatron_does() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode("0 7  99\n100") == [0, 7, 99, 100]
    assert tokenizer.decode([1, 2]) == "1 2"
    for text in ("101", "-1", "1.5", "x", "²", "9" * 5000):
        with pytest.raises(DataError, match="not a token id"):
            tokenizer.encode(text)


def test_half_a_surrogate_pair_is_refused(bpe: Path) -> None:
    for tokenizer in (build_tokenizer("ByteTokenizer"), gpt2(bpe), hugging_face(bpe)):
        with pytest.raises(DataError, match=r"surrogate '\\ud800' at character 2"):
            tokenizer.encode("ab\ud800")


def test_bytes_cut_inside_a_character_decode() -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.decode([*tokenizer.encode("é")[:1], 256, 65]) == "\ufffdA"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type": "GPT2BPETokeniser"}, "did you mean GPT2BPETokenizer"),
        ({"type": "hugging face"}, "did you mean HuggingFaceTokenizer"),
        ({"type": "zzz"}, "known: GPT2BPETokenizer, "),
        ({"type": "TikTokenizer"}, "convert_tiktoken_to_fast"),
        ({"type": "Llama2Tokenizer"}, "needs --tokenizer-model"),
        ({"type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
        ({"type": "GPT2BPETokenizer", "vocab_file": "v"}, "needs --merge-file"),
        ({"type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
        ({"type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
        ({"type": "NullTokenizer"}, "needs --vocab-size"),
        ({"type": "NullTokenizer", "vocab_size": 0}, "--vocab-size: 0; wanted at least 1"),
        ({"type": "NullTokenizer", "vocab_size": 2**31}, "wanted less than 2147483648"),
        ({"type": "ByteTokenizer", "model": "m"}, "--tokenizer-model: given, but ByteTokenizer"),
        ({"type": "ByteTokenizer", "vocab_size": 256}, "--vocab-size: 256, but ByteTokenizer has"),
    ],
)
def test_wrong_flags_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_tokenizer(**arguments)
    assert message in str(error.value)


def test_absent_package_names_the_extra(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for build in (lambda: gpt2(bpe), lambda: hugging_face(bpe)):
        with pytest.raises(ConfigError, match=r"tokenizers: not installed.*sparsetron\[data\]"):
            build()


def _edited(bpe: Path, tmp_path: Path, change) -> Path:
    vocab = json.loads((bpe / "vocab.json").read_text())
    merges = (bpe / "merges.txt").read_text().split("\n")
    change(vocab, merges)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, m: v.update(zz=5), "both have id 5"),
        (lambda v, m: v.update(zz=900), "none has id 300; wanted no gap"),
        (lambda v, m: v.update(zz=-1), "id -1; wanted a whole number"),
        (lambda v, m: v.update(zz="7"), "id '7'; wanted a whole number"),
        (lambda v, m: v.update({"xy": v.pop("<|endoftext|>")}), "has no <|endoftext|> entry"),
        (lambda v, m: v.update({"xy": v.pop("Ā")}), "lacks 1 of the 256 byte symbols"),
        (lambda v, m: m.insert(3, "t h e"), "merges.txt:4: 't h e' is not two parts"),
        (lambda v, m: m.insert(3, "the"), "merges.txt:4: 'the' is not two parts"),
        (lambda v, m: m.insert(5, m[1]), "is on line 2 already"),
        (lambda v, m: m.insert(2, "q z"), "merges.txt:3: 'qz' is not in"),
        (lambda v, m: m.__delitem__(slice(None)), "holds no merges"),
    ],
)
def test_damaged_bpe_files_are_refused(bpe: Path, tmp_path: Path, change, message: str) -> None:
    with pytest.raises(DataError) as error:
        gpt2(_edited(bpe, tmp_path, change))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_vocabulary_are_refused(bpe: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "gone.json": (None, "no such file"),
        "broken.json": (b'{\n"a": 0,\n', "broken.json:3: not JSON"),
        "twice.json": (b'{"a": 0, "a": 1}', "'a' occurs twice"),
        "list.json": (b"[]", "holds a JSON list"),
        "latin.json": (b'{\n"\xe9": 0}', "latin.json:2: not UTF-8"),
        "pipe": (None, "is a pipe"),
        ".": (None, "is a folder"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as error:
            build_tokenizer(
                "GPT2BPETokenizer",
                vocab_file=str(tmp_path / name),
                merge_file=str(bpe / "merges.txt"),
            )
        assert message in str(error.value)


def test_tokenizer_json_is_checked(bpe: Path, tmp_path: Path) -> None:
    good = json.loads((bpe / "tokenizer.json").read_text())
    doubled = json.loads(json.dumps(good))
    doubled["model"]["vocab"]["zz"] = 7
    unmarked = json.loads(json.dumps(good).replace("<|endoftext|>", "<|stop|>"))
    cases = [({}, "has no 'model'"), (doubled, "both have id 7"), (unmarked, "no end mark")]
    cases.append(({"model": {"type": "Nothing"}}, "not a tokenizer.json"))
    for content, message in cases:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(DataError) as error:
            hugging_face(tmp_path / "tokenizer.json")
        assert message in str(error.value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(unmarked))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    assert hugging_face(tmp_path).eod == 0
    with pytest.raises(DataError, match="no such file"):
        hugging_face(tmp_path / "other.json")


@pytest.mark.parametrize("id", [[1], "1", -1, 1.5, True, None, 2**31, 10**30])
def test_an_id_that_is_no_token_id_is_refused(bpe: Path, tmp_path: Path, id: object) -> None:
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = id
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="'?zz'? has id .*wanted a whole number from 0"):
        hugging_face(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"continuing_subword_prefix": "#" * 99}},
    ],
)
def test_a_rust_panic_is_a_data_error_of_one_line(
    bpe: Path, tmp_path: Path, change: dict, capfd: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["model"] |= change.pop("model", {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(DataError, match="not a tokenizer.json: ") as error:
        hugging_face(tmp_path)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


def test_a_panic_while_encoding_is_a_data_error(bpe: Path, tmp_path: Path) -> None:
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="the tokenizer cannot encode it: "):
        hugging_face(tmp_path).encode("some text")


def test_integers_of_too_many_digits_are_refused(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": ' + "9" * 5000 + "}")
    (tmp_path / "merges.txt").write_bytes((bpe / "merges.txt").read_bytes())
    with pytest.raises(DataError, match="vocab.json: not JSON: Exceeds the limit") as error:
        gpt2(tmp_path)
    assert len(str(error.value)) < 500


def test_code_that_comes_with_a_tokenizer_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder, mark = tmp_path / "model", tmp_path / "mark"
    folder.mkdir()
    names = {"AutoTokenizer": ["own.Own", "own.Own"]}
    config = {"tokenizer_class": "Own", "auto_map": names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    code = f"open({str(mark)!r}, 'w').close()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    with pytest.raises(DataError, match="code that comes with a tokenizer is never run"):
        build_tokenizer("HuggingFaceTokenizer", model=str(folder), hub=True)
    assert not mark.exists() and asked == []


@pytest.mark.parametrize(("hub", "is_folder"), [(True, True), (True, False), (False, False)])
def test_only_a_name_that_the_user_gave_is_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: bool, is_folder: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    seen: list[dict[str, object]] = []

    def refuse(name: str, **arguments: object) -> None:
        seen.append(arguments)
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    model = str(tmp_path) if is_folder else "someone/model"
    with pytest.raises(DataError, match="not here"):
        build_tokenizer("HuggingFaceTokenizer", model=model, hub=hub)
    local = is_folder or not hub
    assert seen == [{"local_files_only": local, "trust_remote_code": False}]
    described = {"type": "HuggingFaceTokenizer", "files": {"model": model}, "fingerprint": "0"}
    with pytest.raises(DataError, match="not here"):
        tokenizer_from_sidecar(described)
    assert seen[1]["local_files_only"] is True


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_place_that_cannot_be_looked_at_is_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    hidden = str(tmp_path / "hidden" / "tokenizer.json")
    real = os.stat

    def stat(path, *arguments, **named):
        if str(path) == hidden:
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    described = {"type": "HuggingFaceTokenizer", "files": {"model": hidden}, "fingerprint": "0"}
    for build in (lambda: hugging_face(Path(hidden)), lambda: tokenizer_from_sidecar(described)):
        with pytest.raises(DataError, match="tokenizer.json: cannot be looked at"):
            build()


def test_an_over_long_name_in_a_description_is_refused_in_a_short_line() -> None:
    described = {"type": "HuggingFaceTokenizer", "fingerprint": "0"}
    for name in ("/" + "x" * 100_000, "x" * 5000):
        with pytest.raises(DataError, match="cannot be looked at") as error:
            tokenizer_from_sidecar({**described, "files": {"model": name}})
        assert len(str(error.value)) < 500


def test_fingerprint_follows_the_ids_alone(bpe: Path, tmp_path: Path) -> None:
    first = gpt2(bpe)
    vocab = json.loads((bpe / "vocab.json").read_text())
    backwards = dict(reversed(vocab.items()))
    (tmp_path / "vocab.json").write_text(json.dumps(backwards, indent=3), encoding="utf-8-sig")
    merges = (bpe / "merges.txt").read_text().removeprefix("#version: 0.2\n")
    (tmp_path / "merges.txt").write_bytes(merges.replace("\n", "\r\n").encode())
    assert gpt2(tmp_path).fingerprint() == first.fingerprint()
    swapped = merges.split("\n")
    swapped[0], swapped[1] = swapped[1], swapped[0]
    (tmp_path / "merges.txt").write_text("\n".join(swapped))
    assert gpt2(tmp_path).fingerprint() != first.fingerprint()
    sizes = {build_tokenizer("NullTokenizer", vocab_size=n).fingerprint() for n in (5, 6)}
    assert len(sizes | {build_tokenizer("ByteTokenizer").fingerprint(), first.fingerprint()}) == 4


def test_description_rebuilds_the_tokenizer(bpe: Path) -> None:
    null = build_tokenizer("NullTokenizer", vocab_size=50)
    for tokenizer in (gpt2(bpe), hugging_face(bpe), build_tokenizer("ByteTokenizer"), null):
        info = json.loads(json.dumps(tokenizer.describe()))
        again = tokenizer_from_sidecar(info)
        assert again.fingerprint() == tokenizer.fingerprint()
        assert (again.eod, again.vocab_size) == (info["eod"], info["vocab_size"])
        assert again.encode("1 2") == tokenizer.encode("1 2")


def test_description_of_files_that_moved_or_changed(bpe: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (old / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    info = hugging_face(old).describe()
    (old / "tokenizer.json").rename(new / "tokenizer.json")
    with pytest.raises(DataError, match="is gone or has moved.*--tokenizer-type HuggingFace"):
        tokenizer_from_sidecar(info)
    assert tokenizer_from_sidecar(info, folder=new).encode("cat")
    train_byte_level_bpe(TEXT, vocab_size=290, output=new / "tokenizer.json")
    with pytest.raises(DataError, match="not the tokenizer that made the data"):
        tokenizer_from_sidecar(info, folder=new)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"type": "Unknown", "files": {}, "fingerprint": "0"},
        {"type": "ByteTokenizer", "files": [], "fingerprint": "0"},
        {"type": "ByteTokenizer", "files": {"model": "x"}, "fingerprint": "0"},
        {"type": "ByteTokenizer", "files": {}, "fingerprint": "0"},
        {"type": "ByteTokenizer", "files": {}},
        {"type": ["x"], "files": {}, "fingerprint": "0"},
        {"type": "NullTokenizer", "files": {}, "fingerprint": "0", "vocab_size": "many"},
        {"type": "HuggingFaceTokenizer", "files": {}, "fingerprint": "0"},
    ],
)
def test_damaged_description_is_refused(info: dict) -> None:
    with pytest.raises(DataError):
        tokenizer_from_sidecar(info)


def test_training_twice_gives_one_file(bpe: Path, tmp_path: Path) -> None:
    train_byte_level_bpe(iter(TEXT), vocab_size=300, output=tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == (bpe / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigError, match="--vocab-size: 256"):
        train_byte_level_bpe(TEXT, vocab_size=256, output=tmp_path / "x.json")
    with pytest.raises(ConfigError, match="--vocab-size: 99999999999; wanted at most 1048576"):
        train_byte_level_bpe(TEXT, vocab_size=99_999_999_999, output=tmp_path / "x.json")
    with pytest.raises(DataError, match="too little text"):
        train_byte_level_bpe(["ab"], vocab_size=300, output=tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()
