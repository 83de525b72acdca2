"""`tools/average_checkpoints.py`: right means, a checkpoint that runs and tools take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import ENVIRONMENT, SAVE
from megatron.checkpoint.io import Files
from megatron.checkpoint.store import Checkpoint, LocalShard, save_checkpoint, whole
from tests.ranks import Ranks
from tests.tools.runs import make_model_run
from tests.training.harness import NO_DROPOUT, TINY, metrics_of, train
from tests.training.test_samo import DSR, EARLY_BIRD, RADIUS, SAMO
from tools.average_checkpoints import main
from tools.run_model import CONFIG, PARAM, find_model


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        f"{PARAM}a.weight": torch.randn(6, 5, generator=generator),
        f"{PARAM}a.bias": torch.randn(6, generator=generator),
        "buffer/bn.running_mean": torch.randn(3, generator=generator),
        "exp_avg/a.weight": torch.randn(6, 5, generator=generator),
    }


def make_run(folder: Path, steps: tuple[int, ...] = (2, 4, 6)) -> Path:
    identity = {
        "model.width": 5,
        "gradient.grad_path": "radius",
        "radius.radius_density": 0.1,
        "training.seed": 1,
    }
    for step in steps:
        state = {"identity": identity, "progress": progress(step)}
        save_checkpoint(folder / "checkpoints", step=step, tensors=weights(step), state=state)
    (folder / CONFIG).write_text("model: {}\n")
    return folder


def progress(step: int) -> dict[str, int]:
    return {"iteration": step, "consumed_samples": 4 * step, "applied_samples": 4 * step}


def masked_step(folder: Path, step: int, kept: torch.Tensor) -> None:
    name, values = f"{PARAM}a.weight", weights(step)[f"{PARAM}a.weight"]
    shards = [
        whole("mask/a.weight", kept),
        LocalShard(name, values[kept], (6, 5), (0, 0), (6, 5), mask="mask/a.weight"),
        whole(f"{PARAM}a.bias", weights(step)[f"{PARAM}a.bias"]),
    ]
    state = {"identity": {"gradient.grad_path": "samo", "samo.samo_sparsity": 0.5}}
    save_checkpoint(folder / "checkpoints", step=step, tensors=shards, state=state)


@pytest.mark.parametrize(
    ("choice", "steps"), [(["--last", "2"], [4, 6]), (["--steps", "6,2"], [2, 6])]
)
def test_weights_and_buffers_are_means(
    tmp_path: Path, choice: list[str], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = make_run(tmp_path / "run"), tmp_path / "mean"
    assert main([str(run), *choice, "--output", str(output)]) == 0
    told = capsys.readouterr().out
    assert f"the mean of 2 checkpoints of {run}, steps {steps[0]}, {steps[1]}\n" in told
    with Checkpoint.open(output / "checkpoints" / "step_00000006") as saved:
        assert "exp_avg/a.weight" not in saved.names()
        assert saved.state["averaged_steps"] == steps
        identity = saved.state["identity"]
        assert identity == {"model.width": 5, "training.seed": 1, "gradient.grad_path": "dense"}
        for name in (f"{PARAM}a.weight", f"{PARAM}a.bias", "buffer/bn.running_mean"):
            wanted = torch.stack([weights(step)[name].double() for step in steps]).mean(0)
            assert torch.equal(saved.read(name), wanted.float())
    assert (output / CONFIG).read_text() == "model: {}\n"


def test_a_run_is_averaged_where_it_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its configuration, and never into either folder."""
    run, elsewhere = make_run(tmp_path / "run", (2, 4)), make_run(tmp_path / "disk", (6, 8))
    (elsewhere / CONFIG).unlink()
    saved, output = (elsewhere / "checkpoints").rename(tmp_path / "saved"), tmp_path / "mean"
    (run / ENVIRONMENT).write_text(json.dumps({SAVE: str(saved)}))
    for inside in (run, run / "mean", saved):
        given = [str(run), "--last", "2", "--output", str(inside)]
        refused(capsys, given, 2, "the run that is read; give a folder outside")
    assert main([str(run), "--last", "2", "--output", str(output)]) == 0
    assert "steps 6, 8\n" in capsys.readouterr().out
    assert (output / "checkpoints" / "step_00000008").is_dir()
    assert (output / CONFIG).read_text() == "model: {}\n"


def test_pruned_weights_stay_pruned(tmp_path: Path) -> None:
    kept = torch.arange(30).view(6, 5) % 3 == 0
    for step in (1, 2):
        masked_step(tmp_path / "run", step, kept)
    output = tmp_path / "mean"
    assert main([str(tmp_path / "run"), "--last", "2", "--output", str(output)]) == 0
    with Checkpoint.open(output / "checkpoints" / "step_00000002") as saved:
        mean = (weights(1)[f"{PARAM}a.weight"].double() + weights(2)[f"{PARAM}a.weight"]) / 2
        assert torch.equal(saved.read(f"{PARAM}a.weight"), mean.float() * kept)
        assert saved.mask(f"{PARAM}a.weight") == "mask/a.weight"
        assert saved.state["identity"]["gradient.grad_path"] == "samo"
        assert saved.state["identity"]["samo.samo_sparsity"] == 0.5


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str):
    assert main(arguments) == code
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and words in told


def test_other_masks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        masked_step(tmp_path / "run", step, torch.arange(30).view(6, 5) % (step + 1) == 0)
    given = [str(tmp_path / "run"), "--last", "2", "--output", str(tmp_path / "x")]
    refused(capsys, given, 4, "the mask of param/a.weight is not that of")


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, more = make_run(tmp_path / "run"), ["--output", str(tmp_path / "x")]
    refused(capsys, [str(run), "--last", "4", *more], 4, "holds 3 checkpoints, fewer than --last 4")
    refused(capsys, [str(run), "--steps", "2,5", *more], 4, "has no step 5; steps found: 2, 4, 6")
    refused(capsys, [str(run), "--steps", "2,x", *more], 2, "--steps: 2,x")
    refused(capsys, [str(tmp_path / "no"), *more], 4, "no checkpoint was committed")
    (run / "checkpoints" / "step_00000004" / "rank_00000.safetensors").write_bytes(b"x")
    refused(capsys, [str(run), "--last", "2", *more], 4, "step_00000004")
    with pytest.raises(SystemExit):
        main([str(run), "--last", "0", *more])


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder, with the bytes of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("given", ["run", "run/checkpoints", "link"])
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("run", "run is "),
        ("run/averaged", "averaged lies in "),
        ("run/checkpoints", "checkpoints lies in "),
        ("link/averaged", "averaged lies in "),
        ("other/../run", "run is "),
        ("other", "other holds checkpoints (steps 2, 8)"),
        ("other/checkpoints", "checkpoints holds checkpoints (steps 2, 8)"),
        ("started", f"started holds a {CONFIG}"),
    ],
)
def test_no_run_is_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, output: str, words: str
) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "other", steps=(2, 8))
    (tmp_path / "other" / CONFIG).unlink()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / CONFIG).write_text("model: {}\n")
    before = contents(tmp_path)
    arguments = [str(tmp_path / given), "--last", "2", "--output", str(tmp_path / output)]
    refused(capsys, arguments, 2, words)
    assert contents(tmp_path) == before


def test_a_run_that_saves_elsewhere_may_be_averaged_beside_it(tmp_path: Path) -> None:
    saved = make_run(tmp_path / "run").joinpath("checkpoints").rename(tmp_path / "saved")
    assert main([str(saved), "--last", "1", "--output", str(tmp_path / "mean")]) == 0
    assert (tmp_path / "mean" / "checkpoints" / "step_00000006").is_dir()


def test_weights_pruned_in_one_step_alone_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked_step(tmp_path / "run", 1, torch.arange(30).view(6, 5) % 2 == 0)
    names = (f"{PARAM}a.weight", f"{PARAM}a.bias")
    dense = {name: weights(2)[name] for name in names}
    save_checkpoint(tmp_path / "run" / "checkpoints", step=2, tensors=dense, state={})
    given = [str(tmp_path / "run"), "--last", "2", "--output", str(tmp_path / "x")]
    refused(capsys, given, 4, "step_00000001: param/a.weight is pruned there and not in")


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=(2,))
    other = {f"{PARAM}a.weight": torch.zeros(6, 5), f"{PARAM}b": torch.zeros(2)}
    save_checkpoint(run / "checkpoints", step=3, tensors=other, state={})
    given = [str(run), "--last", "2", "--output", str(tmp_path / "x")]
    refused(capsys, given, 4, "param/b is not as in")


def test_a_run_and_tools_take_the_mean(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} {NO_DROPOUT} --save-interval 2"
    ranks.run(2, train, f"{flags} --use-distributed-optimizer", tmp_path / "run")
    output = tmp_path / "mean"
    assert main([str(tmp_path / "run"), "--last", "3", "--output", str(output)]) == 0
    steps = [tmp_path / "run" / "checkpoints" / f"step_0000000{n}" for n in (4, 6, 8)]
    mean: dict[str, torch.Tensor] = {}
    for step in steps:
        with Checkpoint.open(step) as saved:
            for name in saved.names(PARAM):
                mean[name] = mean.get(name, 0) + saved.read(name).double() / 3
    # As weights for a new run, as the model at this step, and as the model of a tool.
    for more in (f"--load {output} --finetune", f"--load {output} --no-load-optim"):
        folder = tmp_path / more.replace(" ", "_").replace("/", "_")
        (started,) = ranks.run(1, train, f"{flags} --train-iters 8 {more} --skip-train", folder)
        for name, value in started["params"].items():
            wanted = mean[f"{PARAM}{name}"]
            found = value.double()[: len(wanted)]  # without padding of the vocabulary
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
        assert metrics_of(folder, "valid_loss")
    assert find_model(output).step == output / "checkpoints" / "step_00000008"


def load_flags(told: str) -> str:
    """The flags that the tool printed to start a run."""
    (line,) = [line for line in told.splitlines() if line.startswith("start a run from it with ")]
    return line.removeprefix("start a run from it with ")


@pytest.mark.push
@pytest.mark.parametrize(
    "path",
    [
        EARLY_BIRD,
        f"{DSR} --dsr-until 7 --dsr-threshold 0.01",
        f"--grad-path samo+radius {RADIUS}",
        "--grad-wire int8",
    ],
)
def test_a_run_with_masks_goes_on_from_its_mean_by_the_line_that_is_printed(
    ranks: Ranks, tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{TINY} {NO_DROPOUT} {SAMO} {path} --save-interval 1"
    ranks.run(2, train, flags, tmp_path / "run")
    output = tmp_path / "mean"
    capsys.readouterr()
    assert main([str(tmp_path / "run"), "--last", "2", "--output", str(output)]) == 0
    load = load_flags(capsys.readouterr().out)
    folder = tmp_path / "next"
    ranks.run(2, train, f"{flags} --train-iters 12 {load}", folder)
    losses = metrics_of(folder)
    assert len(losses) == 3 and losses[0] < metrics_of(tmp_path / "run")[0]
    masks: list[dict[str, torch.Tensor]] = []
    for step in (output / "checkpoints/step_00000009", folder / "checkpoints/step_00000010"):
        with Checkpoint.open(step) as saved:
            masks.append({name: saved.read(name) for name in saved.names("mask/")})
    before, after = masks
    assert before and before.keys() == after.keys()
    for name, mask in before.items():
        assert int(mask.count_nonzero()) < mask.numel()
        assert torch.equal(after[name], mask) or "--dsr-interval" in path, name


def test_one_mean_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is read when those before it were written."""
    for step in (1, 2):
        masked_step(tmp_path / "run", step, torch.arange(30).view(6, 5) % 3 == 0)
    events: list[str] = []
    read, write = Checkpoint.read, Files.write

    def reading(saved: Checkpoint, name: str) -> torch.Tensor:
        if name.startswith(PARAM):
            events.append(name)
        return read(saved, name)

    def writing(files: Files, descriptor: int, data: memoryview) -> int:
        events.append("write")
        return write(files, descriptor, data)

    monkeypatch.setattr(Checkpoint, "read", reading)
    monkeypatch.setattr(Files, "write", writing)
    given = [str(tmp_path / "run"), "--last", "2", "--output", str(tmp_path / "mean")]
    assert main(given) == 0
    weights = [2 * [f"{PARAM}a.{kind}"] + ["write"] for kind in ("bias", "weight")]
    # Before the weights, the header is written; after them the mask.
    assert events[: 1 + 6] == ["write", *weights[0], *weights[1]]
    assert set(events[7:]) == {"write"}


def test_the_mean_of_one_step_generates_like_that_step(tmp_path: Path) -> None:
    model = make_model_run(tmp_path / "run", "", vocab_size=64)
    assert main([str(tmp_path / "run"), "--last", "1", "--output", str(tmp_path / "mean")]) == 0
    again = find_model(tmp_path / "mean").load()
    for name, value in model.logical_values().items():
        assert torch.equal(again.logical_values()[name], value)
