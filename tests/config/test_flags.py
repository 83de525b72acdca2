"""The command line: names, Megatron's other names, help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import parse, resolve
from megatron.config.gpt import SPECS, GPTConfig
from megatron.config.megatron_flags import (
    ELSEWHERE,
    IGNORED,
    MEGATRON_NAMES,
    OLD_NAMES,
    REFUSED,
    SYNONYMS,
)
from megatron.config.validate import pairs_of
from megatron.errors import ConfigError
from tests.config.helpers import (
    PATHS,
    REQUIRED,
    flags,
    read,
    read_yaml,
    refusal,
    refused,
    yaml_text,
)

REPO = Path(__file__).resolve().parents[2]


def test_unknown_flags() -> None:
    assert refused("--hiden-size", "4") == (
        "--hiden-size: no such flag; did you mean --hidden-size?; see --help"
    )
    assert refused("--learning-rate=1").startswith(
        "--learning-rate: no such flag; did you mean --lr"
    )
    assert refused("--hidden", "4").startswith("--hidden: no such flag")
    assert refused("-x").startswith("-x: no such flag")
    assert refused("stray") == "stray: stands alone; every value follows a --flag"
    assert refused("--a\nb").startswith(r"'--a\nb': no such flag")
    assert refused("--lr").startswith("--lr: expected one argument")
    assert refused("configs/gpt_tiny.yaml") == (
        "configs/gpt_tiny.yaml: stands alone; give a configuration file as --config FILE"
    )


@pytest.mark.parametrize("flag", ["--bar", "--foo", "--xy", "--no"])
def test_a_flag_unlike_all_others_has_no_suggestion(flag: str) -> None:
    assert refused(flag, "3") == f"{flag}: no such flag; see --help"


def test_an_unknown_flag_excuses_only_the_texts_behind_it() -> None:
    bar, stray = "--bar: no such flag", "stray: stands alone; every value follows a --flag"
    file = "x.yaml: stands alone; give a configuration file as --config FILE"
    assert refused("--bar", "3", "stray").startswith(bar)
    for argv, parts in (
        (["--bar", "3", "stray", "x.yaml"], [bar, file]),
        (["--bar", "x.yaml"], [bar, file]),
        (["--bar", "3", "--seed", "3", "stray"], [bar, stray]),
        (["--bar", "--seed", "3", "stray", "x.yaml"], [bar, stray, file]),
        (["stray", "--bar", "stray"], [bar, stray]),
        (["--seed", "3", "stray", "--bar", "stray", "x.yml"], [bar, stray, "x.yml: stands alone"]),
    ):
        message = refused(*argv)
        assert message.startswith(f"{len(parts)} settings are refused: "), message
        for part in parts:
            assert message.count(part) == 1, message


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--precision", "here it is --bf16 or --fp16"),
        ("--dtype", "here it is --bf16 or --fp16"),
        ("--resume", "a run resumes automatically"),
        ("--init_from", "here it is --load"),
        ("--gradient-accumulation-steps", "here it is --global-batch-size"),
        ("--version", "here it is pip show sparsetron"),
        ("--block_size", "did you mean --seq-length?"),
        ("--n_embd", "did you mean --hidden-size?"),
        ("--max_iters", "did you mean --train-iters?"),
    ],
)
def test_flags_of_other_programs_have_hints(flag: str, hint: str) -> None:
    message = refused(flag, "x")
    assert message.startswith(f"{flag}: no such flag; ") and hint in message, message


def test_names_of_other_programs_mean_fields() -> None:
    assert set(SYNONYMS.values()) <= set(SPECS)
    assert not (set(SYNONYMS) | set(ELSEWHERE)) & set(SPECS)
    assert not set(SYNONYMS) & set(ELSEWHERE)


def test_all_refusals_come_in_one_message() -> None:
    message = refused("--hiden-size", "4", "--num-experts", "8", "--lr", "x", "--grad-path", "dens")
    assert message.startswith("4 settings are refused: (1) ")
    for part in (
        "--num-experts 8: not supported: no mixture of experts",
        "--hiden-size: no such flag; did you mean --hidden-size?",
        "--grad-path: dens is not known",
        "--lr: x is not a number",
    ):
        assert part in message
    assert "4: stands alone" not in message
    assert refused("--num-experts", "8", "--num-experts", "8").startswith("--num-experts 8: not")


def test_the_last_of_equal_flags_counts() -> None:
    config = read("--lr", "1", "--lr", "2", "--norm-epsilon", "1", "--layernorm-epsilon", "2")
    assert (config.optimizer.lr, config.model.norm_epsilon) == (2.0, 2.0)
    config = read("--layernorm-epsilon", "2", "--norm-epsilon", "1")
    assert config.model.norm_epsilon == 1.0
    assert refused("--lr", "1", "--lr", "x").startswith("--lr: x is not a number")


def test_missing_fields_name_their_flags() -> None:
    assert refusal([]) == (
        "num_layers, hidden_size, num_attention_heads, seq_length, micro_batch_size: not given; "
        "give --num-layers, --hidden-size, --num-attention-heads, --seq-length, "
        "--micro-batch-size, or the same in a --config file"
    )
    assert refusal(flags(REQUIRED)).startswith("train_iters, train_samples: neither given")
    assert refusal([*flags(REQUIRED), "--train-iters", "1"]).startswith("lr: not given; give --lr")
    config = resolve(parse([*flags(REQUIRED), "--skip-train"], paths=PATHS), 1)
    assert (config.total_iterations(), config.total_samples()) == (0, 0)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    config = read_yaml(path, yaml_text(), ["--lr", "0.003", "--seq-length", "32"])
    assert config.optimizer.lr == 0.003
    assert f"--lr 0.003 overrides 0.001 of {path}:7: lr" in config.notices
    assert not any("seq" in notice for notice in config.notices)


@pytest.mark.parametrize("old", OLD_NAMES, ids=lambda old: old.flag)
def test_old_names_are_read_and_announced(old) -> None:
    values = {"recompute_method": "block", "recompute_num_layers": "2", "norm_epsilon": "0.5"}
    value = old.text or values[old.field]
    more = [] if old.field == "recompute_granularity" else ["--recompute-granularity", "full"]
    config = read(*more, old.flag, *([] if old.text else [value]))
    assert str(config.values()[old.field]) == value
    assert f"{old.flag}: {old.outcome}" in config.notices
    assert refused(old.flag, "x").count(old.flag if old.text is None else "x")


def test_activation_checkpointing_of_old_scripts() -> None:
    config = resolve(read("--checkpoint-activations", "--checkpoint-num-layers", "1"), 1)
    recompute = config.recompute
    assert recompute.recompute_granularity == "full"
    assert (recompute.recompute_method, recompute.recompute_num_layers) == ("uniform", 1)


@pytest.mark.parametrize("name", IGNORED, ids=lambda name: name.flag)
def test_ignored_names_change_nothing_and_are_announced(name) -> None:
    config = read(name.flag, *["7"] * int(name.takes))
    assert config == read()
    assert f"{name.flag}: ignored: {name.reason}" in config.notices


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: name.flag)
def test_refused_names_say_why(name) -> None:
    assert refused(name.flag, "2").startswith(f"{name.flag} 2: {name.reason}")
    if name.accepted:
        config = read(name.flag, name.accepted[0])
        assert config == read()
        assert f"{name.flag} {name.accepted[0]}: changes nothing here" in config.notices
    else:
        assert refused(name.flag).startswith(f"{name.flag}: {name.reason}")


def test_names_that_scripts_use_do_not_clash() -> None:
    others = [name.flag for name in MEGATRON_NAMES]
    assert len(set(others)) == len(others)
    assert not set(others) & {spec.flag for spec in SPECS.values()}
    assert {old.field for old in OLD_NAMES} <= set(SPECS)


def test_a_megatron_script_runs() -> None:
    script = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
        --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 500
        --lr 0.00015 --lr-decay-iters 320 --lr-decay-style cosine --min-lr 1.0e-5
        --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --data-path my-gpt2
        --vocab-file v.json --merge-file m.txt --data-impl mmap --split 949,50,1 --DDP-impl local
        --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save c/x
        --load c/x --distributed-backend nccl --num-workers 2 --use-mcore-models --local-rank 0
        --transformer-impl local --attention-softmax-in-fp32 --tensor-model-parallel-size 1"""
    config = parse(script.split(), paths=PATHS)
    assert config.data.split == "949,50,1"
    assert config.precision.param_dtype == config.precision.grad_dtype == "float16"
    assert any("2^32" in notice and "17 steps" in notice for notice in config.notices)
    assert any(notice.startswith("save_interval 10000 is more") for notice in config.notices)


def test_a_flag_is_known_from_a_line_of_the_file(tmp_path: Path) -> None:
    tiny = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"
    text = tiny.read_text()
    (tmp_path / "run.yaml").write_text(text.replace("data:", "data:\n  tokenizer_model: a/b", 1))
    line = ["--config", str(tmp_path / "run.yaml")]
    config = parse(line, paths=PATHS)
    assert config.data.tokenizer_model == "a/b" and "tokenizer_model" not in config.from_flags
    config = parse([*line, "--tokenizer-model", "c/d"], paths=PATHS)
    assert config.data.tokenizer_model == "c/d" and "tokenizer_model" in config.from_flags


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--help"], paths=PATHS)
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for spec in SPECS.values():
        assert spec.help and spec.help.endswith((".", ")")), spec.name
        assert f"{spec.flag} " in text
        assert " ".join(spec.help.split())[:30] in text or "-" in spec.help
    assert "--sparse-density X Share of entries that are sent. (default: 0.01)" in text
    assert "{dense,sparse,prune,prune+sparse}" in text
    assert "(default: 969, 30, 1)" in text and "(required)" in text


def test_compatibility_is_printed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--help-compat"], paths=PATHS)
    assert left.value.code == 0
    text = capsys.readouterr().out
    for pair in pairs_of(GPTConfig):
        assert f"{pair.name}: {pair.reason}; {pair.instead}" in text
    for name in MEGATRON_NAMES:
        assert f"{name.flag}: {name.outcome}" in text


@pytest.mark.push
def test_no_heavy_import() -> None:
    code = """if True:
        import sys
        from megatron.config import PathOptions, parse, resolve, to_yaml
        class Dense(PathOptions):
            name = "dense"
        config = parse(sys.argv[1:], paths={"dense": Dense()})
        to_yaml(resolve(config, 2))
        print(sorted({"torch", "numpy"} & set(sys.modules)))"""
    line = [*flags(REQUIRED), "--lr", "1", "--train-iters", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *line], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_query_groups_in_fp32_are_told_what_they_keep_on_cuda() -> None:
    groups = ("--group-query-attention", "--num-query-groups", "2")

    def told(*flags: str) -> list[str]:
        return [line for line in read(*flags).notices if "scores of each head" in line]

    (line,) = told(*groups)
    assert "num_query_groups 2 in float32" in line and "MiB a microbatch" in line
    assert not told() and not told(*groups, "--bf16") and not told(*groups, "--device", "cpu")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--bf16", "attention_dropout 0.1: on CUDA torch does not run cuDNN attention"),
        ("--bf16 --attention-dropout 0", ""),
        ("--bf16 --attention-dropout 0.125", ""),
        ("", ""),
        ("--bf16 --kv-channels 188", "head size 188 is not a multiple of 8: on CUDA flash"),
        ("--bf16 --kv-channels 188", "queries, keys and values to heads of 192"),
        ("--bf16 --reset-attention-mask --attention-dropout 0", ""),
        (
            "--bf16 --reset-attention-mask --attention-dropout 0.125",
            "reset_attention_mask with attention_dropout 0.125: on CUDA attention runs once",
        ),
        ("--reset-attention-mask", "reset_attention_mask with heads of 16 in float32: on CUDA"),
        ("--bf16 --kv-channels 260", "no fused kernel of torch takes it, and a layer then keeps"),
        ("--kv-channels 188", ""),
        ("--kv-channels 94", "head size 94 is not a multiple of 4: on CUDA no fused kernel"),
        ("--fp16 --kv-channels 264", "head size 264 is more than 256: on CUDA memory-efficient"),
        (
            "--fp16 --kv-channels 264 --group-query-attention --num-query-groups 2",
            "head size 264 is more than 256: on CUDA no fused kernel",
        ),
        ("--bf16 --kv-channels 256 --attention-dropout 0", ""),
    ],
)
def test_what_keeps_fast_attention_away_is_told(flags: str, told: str) -> None:
    lines = list(read(*flags.split()).cuda_notices())
    assert len(lines) == bool(told) and all(told in line for line in lines)


@pytest.mark.parametrize(
    "flag", ["--micro-batch-size", "--global-batch-size", "--train-iters", "--rampup-batch-size"]
)
def test_sizes_beyond_any_machine_are_refused(flag: str) -> None:
    values = [str(2**63 - 1)] * (3 if flag == "--rampup-batch-size" else 1)
    assert "out of range; must be in [1, " in refused(flag, *values)


def test_a_run_of_too_many_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples; must be at most"):
        resolve(read("--train-iters", str(10**12)), 1)


def test_only_ranks_that_there_are_can_profile() -> None:
    config = read("--profile", "--profile-ranks", "0", "3")
    resolve(config, 4)
    with pytest.raises(ConfigError, match="profile_ranks: there is no rank 3 of 2"):
        resolve(config, 2)


def test_fine_tuning_nothing_is_announced() -> None:
    assert any(notice.startswith("finetune is on without") for notice in read("--finetune").notices)
    assert not any("finetune" in n for n in read("--finetune", "--load", "x").notices)
