"""Tests of Hugging Face export and import: equal numbers there, equal bytes back."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint import store
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.store import Checkpoint
from megatron.config import ModelConfig, parse
from megatron.data.tokenizer import END_OF_TEXT, build_tokenizer
from megatron.data.vocabulary import find_vocabulary
from megatron.errors import ConfigError
from megatron.model import generation
from megatron.model.generation import Sampling
from megatron.model.gpt import GPT
from megatron.model.huggingface_config import from_hf_config
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.limits import LIMIT
from tests.ranks import Ranks, grid
from tests.tools.runs import make_model_run
from tests.training.harness import TINY, train
from tools import evaluate, export_hf, generate, import_hf, zero_shot
from tools.hf_tokenizer import files_of_folder
from tools.run_model import find_model

pytestmark = pytest.mark.push

VOCAB = 101
FORMS = {
    "gpt2": "",
    "another shape": "--gelu erf --max-position-embeddings 24 --ffn-hidden-size 40 "
    "--norm-epsilon 1e-3",
    "untied": "--untie-embeddings-and-output-weights",
    "llama": "--position-embedding-type rope --swiglu --normalization RMSNorm --rotary-base 500 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 2 --kv-channels 6 --ffn-hidden-size 48",
    "llama 3.1": "--position-embedding-type rope --swiglu --normalization RMSNorm "
    "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 4 --disable-bias-linear "
    "--max-position-embeddings 1024",
}


@pytest.mark.parametrize("form", FORMS)
def test_transformers_compute_the_same_and_the_way_back_changes_no_bit(
    form: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="optional package")
    run, there, back, again = (tmp_path / name for name in ("run", "there", "back", "again"))
    ours = make_model_run(run, f"--vocab-size {VOCAB} {FORMS[form]}", vocab_size=VOCAB)
    assert export_hf.main([str(run), str(there)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(there, local_files_only=True).eval()
    tokens = torch.randint(0, VOCAB, (3, 16))
    # Spread over all positions: low frequencies turn little within 16 of them. Without a mask,
    # transformers would take each gap for the start of another text.
    positions = torch.arange(16).expand(3, 16) * (ours.config.positions // 16)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        logits = theirs(tokens, position_ids=positions, attention_mask=mask).logits
        got = ours(tokens, positions)[..., :VOCAB]
        torch.testing.assert_close(got, logits, atol=1e-5, rtol=1e-5)
    assert import_hf.main([str(there), str(back), "--seq-length", "16"]) == 0
    found = find_model(back).load().logical_values()
    assert found.keys() == ours.logical_values().keys()
    assert all(torch.equal(found[name], v) for name, v in ours.logical_values().items())
    assert export_hf.main([str(back), str(again)]) == 0
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (there / file).read_bytes()


def make_bpe(folder: Path) -> tuple[Path, Path]:
    """Train a byte-level BPE of a few merges and return its two files."""
    tokenizers = pytest.importorskip("tokenizers", reason="optional package")
    bpe: Any = tokenizers.ByteLevelBPETokenizer()
    text = ["the cat sat on the mat and the dog sat on the log"] * 9
    bpe.train_from_iterator(text, vocab_size=280, special_tokens=["<|endoftext|>"])
    folder.mkdir()
    bpe.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def test_the_tokenizer_goes_along_both_ways(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="optional package")
    vocab, merges = make_bpe(tmp_path / "bpe")
    flags = f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges}"
    make_model_run(tmp_path / "run", flags, vocab_size=len(json.loads(vocab.read_text())))
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    ours = find_model(tmp_path / "run").tokenizer()
    text = "the cat sat,  on that log\n\tand élan 7"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.eos_token_id == ours.eod
    values = json.loads((tmp_path / "there" / "config.json").read_text())
    assert values["eos_token_id"] == ours.eod
    assert import_hf.main([str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert find_model(tmp_path / "back").tokenizer().fingerprint() == ours.fingerprint()
    (tmp_path / "there" / "merges.txt").write_text("damaged")
    assert import_hf.main([str(tmp_path / "there"), str(tmp_path / "not")]) == 3
    assert not (tmp_path / "not").exists()


def test_a_table_with_more_rows_than_the_tokenizer_has_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published tables are padded, and so are those of runs with `--vocab-size 50304`."""
    vocab, merges = make_bpe(tmp_path / "bpe")
    entries = len(json.loads(vocab.read_text()))
    named = ["--tokenizer-type", "GPT2BPETokenizer"]
    named += ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    run, there, back = (tmp_path / name for name in ("run", "there", "back"))
    # The likeliest token has no entry in the tokenizer.
    rows = entries + 7
    make_model_run(run, f"--vocab-size {rows}", vocab_size=rows, favoured=rows - 1)
    file = tmp_path / "words.jsonl"
    file.write_text('{"text": "the cat sat"}\n')
    (tmp_path / "lambada_openai.jsonl").write_text('{"text": "the cat sat"}\n')
    assert export_hf.main([str(run), str(there), *named]) == 0
    assert import_hf.main([str(there), str(back)]) == 0
    brought = ["--config", str(back / "model.yaml"), "--micro-batch-size", "1", "--lr", "1"]
    data = parse([*brought, "--train-iters", "1"], paths=GRADIENT_PATHS).data
    assert (data.tokenizer_type, data.vocab_size) == ("GPT2BPETokenizer", rows)
    vocabulary = find_vocabulary(data, [])
    assert (vocabulary.size, vocabulary.eod) == (rows, json.loads(vocab.read_text())[END_OF_TEXT])
    capsys.readouterr()
    for model, flags in ((run, named), (back, [])):
        sampled = ["--prompt", "the", "--max-new-tokens", "30", "--temperature", "100"]
        assert generate.main([str(model), *sampled, *flags]) == 0
        assert evaluate.main([str(model), "--task", "lambada", str(file), *flags]) == 0
        saved = find_model(model)
        tokens = model_tokens(saved.load(), vocab_size=entries)
        assert max(tokens) < entries and max(model_tokens(saved.load())) == rows - 1
    scoring = ["--by", "evaluate", "--tasks-dir", str(tmp_path), "--only", "lambada_openai"]
    for model, flags in ((run, named), (there, []), (back, [])):
        assert zero_shot.main([str(model), *scoring, *flags]) == 0
    assert export_hf.main([str(back), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "merges.txt").read_bytes() == merges.read_bytes()
    assert "no tokenizer files" not in capsys.readouterr().err


def model_tokens(model: GPT, vocab_size: int | None = None) -> list[int]:
    greedy = Sampling(greedy=True)
    return list(
        generation.generate(model, [1], max_new_tokens=5, sampling=greedy, vocab_size=vocab_size)
    )


def test_a_tokenizer_with_more_entries_than_the_table_has_rows_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab, merges = make_bpe(tmp_path / "bpe")
    there = hf_folder(tmp_path, "gpt2")
    for file in (vocab, merges):
        shutil.copy(file, there)
    assert import_hf.main([str(there), str(tmp_path / "back")]) == 0
    entries = len(json.loads(vocab.read_text()))
    assert f"the tokenizer has {entries} entries, the model {VOCAB}" in capsys.readouterr().err
    assert "tokenizer_type" not in (tmp_path / "back" / "model.yaml").read_text()


def make_marked_bpe(folder: Path, *, end: bool = False) -> Path:
    """Make a tokenizer.json as Llama's, whose post-processor begins each text with <s>."""
    tokenizers = pytest.importorskip("tokenizers", reason="optional package")
    marks = {"<unk>": 0, "<s>": 1, "</s>": 2}
    letters = "\u2581 t h e c a s o n m d g".split(" ")
    vocab = marks | {letter: 3 + number for number, letter in enumerate(letters)}
    vocab["\u2581t"] = len(vocab)
    bpe = tokenizers.models.BPE(vocab=vocab, merges=[("\u2581", "t")], unk_token="<unk>")
    inner: Any = tokenizers.Tokenizer(bpe)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens(list(marks))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>" if end else "<s> $A",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    # A length that all texts are cut or filled to says nothing about marks.
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_begin_marks_of_a_tokenizer_are_kept(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="optional package")
    bpe = make_marked_bpe(tmp_path / "bpe")
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {bpe}"
    make_model_run(tmp_path / "run", flags, vocab_size=16)
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there", local_files_only=True)
    ours = find_model(tmp_path / "run").tokenizer()
    for text in ("the cat sat on", " ten", ""):
        assert theirs(text)["input_ids"] == ours.encode(text)
    assert ours.encode("") == [theirs.bos_token_id] == [1] and theirs.eos_token_id == ours.eod == 2
    values = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == (1, 2)
    assert import_hf.main([str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert find_model(tmp_path / "back").tokenizer().fingerprint() == ours.fingerprint()


def test_end_marks_of_a_post_processor_are_left_to_append_eod(tmp_path: Path) -> None:
    kind = "HuggingFaceTokenizer"
    begins = build_tokenizer(kind, model=str(make_marked_bpe(tmp_path / "begins")))
    both = build_tokenizer(kind, model=str(make_marked_bpe(tmp_path / "both", end=True)))
    for text in ("the cat", ""):
        assert both.encode(text) == begins.encode(text)
    assert both.encode("") == [1]


def test_16_bit_weights_are_widened_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_model_run(tmp_path / "run", f"--vocab-size {VOCAB}", vocab_size=VOCAB)
    narrow = ["--dtype", "bfloat16"]
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there"), *narrow]) == 0
    real, held = store.save_checkpoint, []

    def spy(*arguments: Any, tensors: Any, **options: Any) -> Path:
        held.extend(shard.tensor for shard in tensors)
        return real(*arguments, tensors=tensors, **options)

    monkeypatch.setattr(store, "save_checkpoint", spy)
    assert import_hf.main([str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
    with Checkpoint.open(find_model(tmp_path / "back").step) as saved:
        for name, value in ours.logical_values().items():
            assert torch.equal(saved.read(f"param/{name}"), value.bfloat16().float())


def hf_folder(tmp_path: Path, form: str, leave_out: str = "", **changed: Any) -> Path:
    """Export a small model without one tensor and with a changed config.json."""
    there = tmp_path / "there"
    make_model_run(tmp_path / "run", f"--vocab-size {VOCAB} {FORMS[form]}", vocab_size=VOCAB)
    assert export_hf.main([str(tmp_path / "run"), str(there)]) == 0
    state = load_file(there / "model.safetensors")
    state.pop(leave_out, None)
    save_file(state, there / "model.safetensors")
    values = json.loads((there / "config.json").read_text()) | changed
    (there / "config.json").write_text(json.dumps(values))
    return there


@pytest.mark.parametrize(
    ("form", "leave_out", "changed", "code", "words"),
    [
        ("untied", "lm_head.weight", {}, 4, "output_layer.weight: missing"),
        ("gpt2", "transformer.wte.weight", {}, 4, "embeddings.weight: missing"),
        ("gpt2", "transformer.h.1.ln_1.bias", {}, 4, "layers.1.input_norm.bias: missing"),
        ("gpt2", "", {"n_embd": 10**12}, 2, "n_embd: 1000000000000; must be a whole number"),
        ("gpt2", "", {"n_embd": 64}, 4, "config.json makes it (vocabulary, 64)"),
        ("gpt2", "", {"n_layer": 10**9}, 2, "n_layer: 1000000000; must be a whole number"),
        ("gpt2", "", {"n_layer": 10**6}, 4, "config.json says 1000000 layers"),
        ("llama", "", {"num_hidden_layers": 10**6}, 4, "config.json says 1000000 layers"),
        # As GPT-2 small's heads with GPT-2 medium's weights: 3 x 32 rows are not 7 heads.
        (
            "gpt2",
            "",
            {"n_embd": 42, "n_head": 7},
            4,
            "transformer.h.0.attn.c_attn.bias: (96,), config.json makes it (126,); the two",
        ),
        (
            "llama",
            "",
            {"num_key_value_heads": 1},
            4,
            "model.layers.0.self_attn.k_proj.weight: (12, 32), config.json makes it (6, 32); the",
        ),
        (
            "llama",
            "",
            {"intermediate_size": 47},
            4,
            "model.layers.0.mlp.gate_proj.weight: (48, 32), config.json makes it (47, 32); the two",
        ),
    ],
)
def test_a_config_of_another_model_is_one_line(
    form: str,
    leave_out: str,
    changed: dict[str, int],
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = hf_folder(tmp_path, form, leave_out, **changed)
    capsys.readouterr()
    assert import_hf.main([str(source), str(tmp_path / "back")]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "back").exists()


def test_the_line_to_train_from_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a b; c"
    assert import_hf.main([str(hf_folder(tmp_path, "gpt2")), str(output)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(line)
    assert str(output) in words and str(output / "model.yaml") in words


def test_an_import_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    source, output = hf_folder(tmp_path, "gpt2"), tmp_path / "back"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", import_hf.__file__, str(source), str(output)]
    try:
        subprocess.run(command, stdout=writer, check=False, timeout=LIMIT)
    finally:
        os.close(writer)
    assert find_model(output).step.is_dir() and (output / "model.yaml").is_file()


def test_the_current_folder_is_no_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model_run(tmp_path / "run", f"--vocab-size {VOCAB}", vocab_size=VOCAB)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert export_hf.main([str(tmp_path / "run"), "."]) == 2
    assert capsys.readouterr().err == "error: .: exists; name a folder that is new\n"


def test_a_tokenizer_of_the_hub_has_no_file_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="optional package")
    bpe = make_marked_bpe(tmp_path / "bpe")
    found = transformers.AutoTokenizer.from_pretrained(bpe, local_files_only=True)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: found)
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model someone/model"
    make_model_run(tmp_path / "run", flags, vocab_size=16)
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    error = capsys.readouterr().err
    assert error.startswith("no tokenizer files: someone/model has no tokenizer.json to copy; ")


def test_a_full_disk_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = hf_folder(tmp_path, "gpt2")
    monkeypatch.setattr(import_hf, "_write", write)
    capsys.readouterr()
    assert import_hf.main([str(source), str(tmp_path / "back")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'back'}: No space left on device\n"


HARNESS_TASK = """
task: last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1] | join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""


def test_the_evaluation_harness_finds_what_our_tool_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The harness uses local files only, as nodes of a cluster must."""
    pytest.importorskip("lm_eval.models.huggingface", reason="optional package: lm_eval[hf]")
    vocab, merges = make_bpe(tmp_path / "bpe")
    flags = f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges}"
    make_model_run(tmp_path / "run", flags, vocab_size=len(json.loads(vocab.read_text())))
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    file = tmp_path / "texts.jsonl"
    texts = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "task.yaml").write_text(HARNESS_TASK.format(file=file))
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={tmp_path / 'there'},dtype=float32"),
        *("--tasks", "last_word", "--include_path", str(tmp_path / "tasks")),
        *("--output_path", str(tmp_path / "found")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "found").rglob("results*.json")
    theirs = json.loads(results.read_text())["results"]["last_word"]
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "run"), "--task", "lambada", str(file), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert ours["perplexity"] == pytest.approx(theirs["perplexity,none"], rel=1e-5)
    assert ours["accuracy"] == theirs["acc,none"]


def test_a_tokenizer_that_cuts_otherwise_than_gpt2_is_taken_whole(tmp_path: Path) -> None:
    """Many models also have GPT-2's two files, which do not describe how text is split."""
    tokenizers = pytest.importorskip("tokenizers", reason="optional package")
    vocab, merges = make_bpe(tmp_path / "bpe")
    inner: Any = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    cuts = tokenizers.pre_tokenizers
    of_bytes = cuts.ByteLevel(add_prefix_space=False)
    digits = cuts.Sequence([cuts.Digits(individual_digits=True), of_bytes])
    whole = tmp_path / "bpe" / "tokenizer.json"
    for cut, kind in ((of_bytes, "GPT2BPETokenizer"), (digits, "HuggingFaceTokenizer")):
        inner.pre_tokenizer = cut
        inner.save(str(whole))
        found = files_of_folder(tmp_path / "bpe")
        assert found is not None and found[0] == kind
    inner.pre_tokenizer = of_bytes
    inner.add_special_tokens(["<|turn|>"])
    inner.save(str(whole))
    assert files_of_folder(tmp_path / "bpe") == (kind, {"tokenizer_model": "tokenizer.json"})
    inner = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    inner.pre_tokenizer = of_bytes
    mark = inner.token_to_id(END_OF_TEXT)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, mark)]
    )
    inner.save(str(whole))
    assert files_of_folder(tmp_path / "bpe") == (kind, {"tokenizer_model": "tokenizer.json"})


def train_cut(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    """Train with every layer sharded over all ranks."""
    return train(grid(groups, tp=groups.world.size), flags, run_dir)


def test_a_pruned_checkpoint_of_a_grid_is_exported_with_zeros(ranks: Ranks, tmp_path: Path) -> None:
    flags = (
        f"{TINY} --train-iters 2 --grad-path samo --samo-sparsity 0.5 --eval-iters 0 "
        "--tensor-model-parallel-size 2"
    )
    ranks.run(2, train_cut, flags, tmp_path / "run")
    step = find_checkpoint(tmp_path / "run", log=print)
    assert step is not None
    assert export_hf.main([str(step), str(tmp_path / "there"), "--dtype", "bfloat16"]) == 0
    assert export_hf.main([str(step), str(tmp_path / "fp32")]) == 0
    from safetensors.torch import load_file

    from megatron.model.huggingface import from_gpt2

    state = load_file(tmp_path / "fp32" / "model.safetensors")
    values = from_gpt2(state, num_heads=4, hidden_size=32)
    pruned = 0
    with Checkpoint.open(step) as saved:
        for name, value in values.items():
            assert torch.equal(value, saved.read(f"param/{name}")), name
            if (mask := saved.mask(f"param/{name}")) is not None:
                assert not value[~saved.read(mask)].any()
                pruned += 1
    assert pruned == 10  # two layers of four matrices, and the tables
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["vocab_size"] == 96 == len(values["embedding.word_embeddings.weight"])
    narrow = load_file(tmp_path / "there" / "model.safetensors")
    assert all(torch.equal(state[name].bfloat16(), value) for name, value in narrow.items())


@pytest.mark.parametrize("world", [1, 2])
def test_training_starts_from_an_import_on_any_grid(
    world: int, ranks: Ranks, tmp_path: Path
) -> None:
    ours = make_model_run(tmp_path / "run", f"--vocab-size {VOCAB}", vocab_size=VOCAB)
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    assert import_hf.main([str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    flags = (
        f"--config {tmp_path}/back/model.yaml --load {tmp_path}/back --finetune --mock-data "
        f"--lr 1e-9 --weight-decay 0 --train-iters 1 --micro-batch-size 2 --eval-iters 0 "
        f"--tensor-model-parallel-size {world}"
    )
    found = ranks.run(world, train_cut, flags, tmp_path / "new")
    kept = found[0]["params"]["embedding.position_embeddings.weight"]
    wanted = ours.logical_values()["embedding.position_embeddings.weight"]
    torch.testing.assert_close(kept, wanted, atol=1e-7, rtol=0)
    assert found[0]["outcome"] == (0, None)


def test_what_no_format_holds_is_refused_by_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--vocab-size 50 --swiglu --kv-channels 4 --qk-layernorm"
    make_model_run(tmp_path / "run", flags, vocab_size=50)
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not (tmp_path / "there").exists()
    assert "qk_layernorm: False (is True)" in error
    for words in ("swiglu: False (is True)", "kv_channels: 8 (is 4)", "normalization: RMSNorm"):
        assert words in error
    assert export_hf.main([str(tmp_path / "nothing"), str(tmp_path / "there")]) == 2
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "run")]) == 2
    assert "name a folder that is new" in capsys.readouterr().err


def broken(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model_type": "bert"}, 2, "model_type: 'bert'"),
        ({"activation_function": "relu"}, 2, "activation_function: 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, 2, "scale_attn_by_inverse_layer_idx: True"),
        ({"n_embd": "32"}, 2, "n_embd: '32'"),
        ({"n_layer": 3}, 4, "layers.2.attention.dense.bias: missing"),
        ({"n_positions": 17}, 4, "position_embeddings.weight"),
        ({"n_head": 5}, 2, "5 heads do not divide"),
    ],
)
def test_an_import_that_does_not_fit_is_one_line(
    changes: dict[str, Any],
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_model_run(tmp_path / "run", f"--vocab-size {VOCAB}", vocab_size=VOCAB)
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    broken(tmp_path / "there", **changes)
    capsys.readouterr()
    assert import_hf.main([str(tmp_path / "there"), str(tmp_path / "back")]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not (tmp_path / "back").exists()


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 2,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def import_scaled(rope: dict[str, Any], key: str = "rope_scaling") -> ModelConfig:
    values = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    return from_hf_config(values | {"max_position_embeddings": 8192, key: rope}, seq_length=16)


def test_rope_scaling_is_imported_from_either_key() -> None:
    for key, rope in (
        ("rope_scaling", LLAMA_3),
        ("rope_parameters", LLAMA_3 | {"rope_theta": 10000.0}),
        ("rope_scaling", {"type": "llama3", "factor": 2}),
    ):
        found = import_scaled(rope, key)
        assert (found.use_rope_scaling, found.rope_scaling_factor) == (True, 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_type": "yarn"}, "rope_type: 'yarn'; only default and llama3"),
        ({"low_freq_factor": 2.0}, "low_freq_factor: 2.0; our model computes with 1.0"),
        ({"high_freq_factor": 8}, "high_freq_factor: 8; our model computes with 4.0"),
        ({"original_max_position_embeddings": 4096}, "4096; our model computes with 8192"),
        ({"factor": 0.5}, "factor: 0.5; must be a number of at least 1"),
        ({"factor": "8"}, "factor: '8'; must be a number of at least 1"),
    ],
)
def test_other_rope_scaling_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        import_scaled(LLAMA_3 | changes)


def test_weights_that_may_not_be_read_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = hf_folder(tmp_path, "gpt2")
    opened = Path.open

    def denied(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", denied)
    capsys.readouterr()
    assert import_hf.main([str(there), str(tmp_path / "back")]) == 4
    told = f"error: {there / 'model.safetensors'}: cannot be read: Permission denied\n"
    assert capsys.readouterr().err == told


def test_weights_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model_run(tmp_path / "run", f"--vocab-size {VOCAB}", vocab_size=VOCAB)
    there = tmp_path / "there"
    assert export_hf.main([str(tmp_path / "run"), str(there)]) == 0
    weights = there / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert import_hf.main([str(there), str(tmp_path / "back")]) == 4
    assert "model.safetensors" in capsys.readouterr().err
    weights.unlink()
    (there / "pytorch_model.bin").write_bytes(b"\x80")
    assert import_hf.main([str(there), str(tmp_path / "back")]) == 4
    assert "is a pickle and is not opened" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    shutil.rmtree(there)
    assert import_hf.main([str(there), str(tmp_path / "back")]) == 2
