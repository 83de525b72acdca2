"""Tests that saved tensors load bitwise, whichever ranks save and load them."""

from __future__ import annotations

import os
import random
import resource
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import CheckpointRanks, QuickFiles, rewrite_manifest, tree
from safetensors import safe_open

from megatron.checkpoint import store
from megatron.checkpoint.format import DATA_PARALLEL, SHARED
from megatron.checkpoint.reader import MOST_MAPS
from megatron.checkpoint.store import Checkpoint, LocalShard, of_rank, owner, save_checkpoint, whole
from megatron.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (0,), (1,), (13,), (0, 4), (5, 7), (2, 3, 4)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bits, which include NaNs with payloads and negative zeros."""
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=source) > 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=source)
    return data.reshape(-1).view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [
        t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for t in (one, other)
    ]
    return torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_is_bitwise_and_the_library_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{i}": random_bits(shape, dtype, i) for i, shape in enumerate(SHAPES)}
    path = save_checkpoint(tmp_path, step=7, tensors=tensors, state={"iteration": 7})
    with Checkpoint.open(path) as saved:
        assert saved.names() == tuple(sorted(tensors))
        for name, tensor in tensors.items():
            assert same(saved.read(name), tensor)
            assert saved.shape(name) == tuple(tensor.shape)
            assert saved.dtype(name) == dtype
    with safe_open(str(path / "rank_00000.safetensors"), "pt") as library:
        for name in library.keys():  # noqa: SIM118 - not a dict
            if dtype != torch.bool:
                assert same(library.get_tensor(name), tensors[name])


def test_a_tensor_is_converted_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": torch.arange(3.0).bfloat16() + i for i in range(4)}
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    real = store._bytes

    def spy(tensor: torch.Tensor) -> memoryview:
        nonlocal most
        alive.append(weakref.ref(tensor))
        most = max(most, sum(each() is not None for each in alive))
        return real(tensor)

    monkeypatch.setattr(store, "_bytes", spy)
    shards = [replace(whole(name, each), dtype=torch.float32) for name, each in tensors.items()]
    path = save_checkpoint(tmp_path, step=1, tensors=shards, state={})
    assert len(alive) == 4 and most == 1
    with Checkpoint.open(path) as saved:
        for name, tensor in tensors.items():
            assert same(saved.read(name), tensor.float())


def test_state_world_and_versions_come_back(tmp_path: Path) -> None:
    state = {"iteration": 3, "lr": 1e-4, "scale": None, "text": "é\u2028", "list": [1, [True]]}
    path = save_checkpoint(
        tmp_path,
        step=3,
        tensors={},
        state=state,
        grid={"tensor_parallel": 1},
        packages={"torch": "2"},
    )
    with Checkpoint.open(path) as saved:
        assert (saved.step, saved.state) == (3, state)
        assert saved.world == {"tensor_parallel": 1, "size": 1}
        assert saved.manifest.packages == {"torch": "2"}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": float("nan")}}, "state.a.b"),
        ({"a": [1, float("inf")]}, "state.a[1]"),
        ({"a": torch.zeros(1)}, "state.a"),
        ({1: 2}, "state"),
    ],
)
def test_a_state_that_json_cannot_hold_is_refused(
    tmp_path: Path, state: dict[Any, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, step=1, tensors={}, state=state)
    assert f"step 1 not saved: {named}: " in str(caught.value)
    assert tree(tmp_path) == {}


def test_tensors_that_are_views_or_want_gradients(tmp_path: Path) -> None:
    base = torch.randn(6, 8, requires_grad=True)
    tensors = {"t": base.t(), "step": base[:, ::2], "row": base[1], "one": base[1:2, 3]}
    path = save_checkpoint(tmp_path, step=1, tensors=tensors, state={})
    with Checkpoint.open(path) as saved:
        for name, tensor in tensors.items():
            assert same(saved.read(name), tensor.detach())


def test_owner_balances_and_depends_on_nothing_else() -> None:
    draw = random.Random(3)
    sizes = {f"t{i}": draw.randint(1, 1000) for i in range(200)}
    shuffled = dict(draw.sample(sorted(sizes.items()), len(sizes)))
    owners = owner(sizes, 4)
    assert owner(shuffled, 4) == owners
    load = [sum(sizes[n] for n, r in owners.items() if r == rank) for rank in range(4)]
    assert max(load) - min(load) <= 1000
    assert max(load) <= sum(sizes.values()) / 4 * 1.01


def test_replicated_tensors_are_written_once_and_by_all(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_bits((64, 4), torch.float32, i) for i in range(8)}

    def save(rank: int, gather: Callable[[str], list[str]]) -> Path:
        return save_checkpoint(
            tmp_path, step=1, tensors=tensors, state={}, rank=rank, world=4, gather=gather
        )

    paths = CheckpointRanks(4).run(save)
    assert set(paths) == {tmp_path / "step_00000001"}
    sizes = [p.stat().st_size for p in sorted(paths[0].glob("*.safetensors"))]
    assert len(sizes) == 4
    assert max(sizes) < 2 * 64 * 4 * 4 + 600
    with Checkpoint.open(paths[0]) as saved:
        assert all(same(saved.read(name), tensor) for name, tensor in tensors.items())


class Layout:
    """One logical state, sharded over 2 tensor-parallel x 2 data-parallel ranks.

    The state has boxes on either axis, optimizer shards of flattened boxes, bits, compressed
    tensors and per-rank tensors.
    """

    shape = (6, 10)

    def __init__(self) -> None:
        whole_shape, mask = self.shape, random_bits(self.shape, torch.bool, 11)
        self.full = {
            "rows": random_bits(whole_shape, torch.bfloat16, 1),
            "columns": random_bits(whole_shape, torch.float32, 2),
            "flat": random_bits((3, 4, 5), torch.float32, 3),
            "flat_columns": random_bits(whole_shape, torch.float32, 4),
            "mask": mask,
            "kept": random_bits(whole_shape, torch.int32, 5).masked_fill(~mask, 0),
            "kept_flat": random_bits(whole_shape, torch.float32, 7).masked_fill(~mask, 0),
            "rest": random_bits(whole_shape, torch.float32, 6).masked_fill(mask, 0),
            "residual": random_bits((2, *whole_shape), torch.float32, 8),
            "pending": random_bits((2, *whole_shape), torch.float32, 9).masked_fill(mask, 0),
            "stage.x": random_bits((3,), torch.float32, 10),
            "scalar": torch.tensor(5),
        }

    def shards(self, rank: int) -> list[LocalShard]:
        tp, dp = rank % 2, rank // 2
        full, mask, shape = self.full, self.full["mask"], self.shape
        rows = (3 * tp, 0), (3 * tp + 3, 10)
        columns = (0, 4 * tp), (6, 4 if tp == 0 else 10)
        in_rows = slice(rows[0][0], rows[1][0]), slice(None)
        in_columns = slice(None), slice(columns[0][1], columns[1][1])
        kept = full["kept"][in_rows][mask[in_rows]]
        pending = full["pending"][dp][in_columns][~mask[in_columns]]
        mine = [
            LocalShard("rows", full["rows"][in_rows], shape, *rows),
            LocalShard("mask", mask[in_columns], shape, *columns),
        ]
        if dp == 1:
            mine = [
                LocalShard("columns", full["columns"][in_columns], shape, *columns),
                LocalShard("kept", kept, shape, *rows, mask="mask"),
            ]
        if rank == 2:
            mine += [whole("stage.x", full["stage.x"]), whole("scalar", full["scalar"])]
            rest = full["rest"][~mask]
            mine.append(
                LocalShard("rest", rest, shape, (0, 0), shape, mask="mask", mask_value=False)
            )
        residual = LocalShard("residual", full["residual"][dp][in_rows], shape, *rows)
        held = LocalShard("pending", pending, shape, *columns, mask="mask", mask_value=False)
        mine += [of_rank(s, data_parallel_rank=dp, data_parallel_size=2) for s in (residual, held)]
        return mine + self.flat_shards(rank, tp, dp, columns, in_columns)

    def flat_shards(
        self, rank: int, tp: int, dp: int, columns: Any, in_columns: Any
    ) -> list[LocalShard]:
        full, mask, shape = self.full, self.full["mask"], self.shape
        cut = [0, 17, 17, 40, 60][rank : rank + 2]
        part = slice(*cut)
        kept = full["kept_flat"].reshape(-1)[part][mask.reshape(-1)[part]]
        ends = (0, 11) if dp == 0 else (11, 24 if tp == 0 else 36)
        local = full["flat_columns"][in_columns].reshape(-1)[slice(*ends)]
        flat = (cut[0], cut[1])
        return [
            LocalShard(
                "flat", full["flat"].reshape(-1)[part], (3, 4, 5), (0, 0, 0), (3, 4, 5), flat=flat
            ),
            LocalShard("kept_flat", kept, shape, (0, 0), shape, flat=flat, mask="mask"),
            LocalShard("flat_columns", local, shape, *columns, flat=ends),
        ]

    def save(self, directory: Path) -> Path:
        def save(rank: int, gather: Callable[[str], list[str]]) -> Path:
            return save_checkpoint(
                directory,
                step=4,
                tensors=iter(self.shards(rank)),
                state={"rank": rank},
                rank=rank,
                world=4,
                gather=gather,
            )

        paths = CheckpointRanks(4).run(save)
        assert all(path == paths[0] for path in paths), paths
        return paths[0]


@pytest.mark.parametrize("maps", [1, MOST_MAPS])
def test_any_region_of_any_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: int
) -> None:
    monkeypatch.setattr("megatron.checkpoint.reader.MOST_MAPS", maps)
    layout = Layout()
    draw = random.Random(5)
    with Checkpoint.open(layout.save(tmp_path)) as saved:
        assert saved.state == {"rank": 0}
        assert saved.names() == tuple(sorted(layout.full))
        for name, full in layout.full.items():
            assert same(saved.read(name), full), name
            for _ in range(40):
                cuts = [sorted((draw.randint(0, n), draw.randint(0, n))) for n in full.shape]
                start, stop = [a for a, _ in cuts], [b for _, b in cuts]
                region = full[tuple(slice(*cut) for cut in cuts)]
                assert same(saved.read(name, start, stop), region), (name, cuts)
                a, b = sorted((draw.randint(0, region.numel()), draw.randint(0, region.numel())))
                flat = saved.read_flat(name, a, b, box_start=start, box_stop=stop)
                assert same(flat, region.reshape(-1)[a:b]), (name, cuts, a, b)


def test_a_per_rank_tensor_knows_it_and_its_mean_is_one_line(tmp_path: Path) -> None:
    layout = Layout()
    with Checkpoint.open(layout.save(tmp_path)) as saved:
        scopes = {name: record.scope for name, record in saved.manifest.tensors.items()}
        assert (scopes["residual"], scopes["rows"]) == (DATA_PARALLEL, SHARED)
        assert (saved.mask("pending"), saved.mask("rows")) == ("mask", None)
        assert same(saved.read("residual", (1, 0, 0), (2, 6, 10))[0], layout.full["residual"][1])
        assert saved.read("residual").mean(0).shape == layout.shape


def test_stored_bytes_are_those_of_what_is_there(tmp_path: Path) -> None:
    """Bits take an eighth of a byte; compressed tensors take nothing for entries left out."""
    mask = torch.rand(100, 80) > 0.9
    tensors = [whole("mask", mask)]
    tensors += [
        LocalShard("m", torch.zeros(int(mask.sum())), (100, 80), (0, 0), (100, 80), mask="mask")
    ]
    path = save_checkpoint(tmp_path, step=1, tensors=tensors, state={})
    assert (path / "rank_00000.safetensors").stat().st_size < 1000 + 4 * int(mask.sum()) + 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [*s, s[0]], "overlap"),
        (lambda s: s[1:], "slices"),
        (lambda s: [LocalShard("rows", torch.zeros(1), (6, 10), (0, 0), (3, 10))], "30 entries"),
        (lambda s: [whole("rows", torch.zeros(2))], "differs from"),
        (lambda s: [whole("bad name", torch.zeros(2)), *s], "bad name"),
        (lambda s: [whole("x", torch.zeros(2, dtype=torch.complex64)), *s], "cannot be saved"),
        (lambda s: [LocalShard("x", torch.zeros(2), (2,), (0, 0), (2,)), *s], "one length"),
        (lambda s: [LocalShard("x", torch.zeros(2), (4,), (0,), (4,), mask="none"), *s], "none"),
        (lambda s: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_every_rank_raises_what_is_wrong_on_one(
    tmp_path: Path, change: Callable[[list[LocalShard]], list[LocalShard]], message: str
) -> None:
    layout = Layout()

    def shards(rank: int) -> Any:
        mine = layout.shards(rank)
        if rank == 1:
            yield from change(mine)
        else:
            yield from mine

    def save(rank: int, gather: Callable[[str], list[str]]) -> Path:
        return save_checkpoint(
            tmp_path, step=4, tensors=shards(rank), state={}, rank=rank, world=4, gather=gather
        )

    errors = CheckpointRanks(4).run(save)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert message in str(errors[0]) and "\n" not in str(errors[0])
    assert list(tmp_path.iterdir()) == []


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    def save(rank: int, gather: Callable[[str], list[str]]) -> Path:
        return save_checkpoint(
            tmp_path, step=rank, tensors=[], state={}, rank=rank, world=2, gather=gather
        )

    errors = CheckpointRanks(2).run(save)
    assert all("step 1" in str(e) and isinstance(e, CheckpointError) for e in errors)


def test_questions_that_have_no_answer(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, step=1, tensors={"t": torch.zeros(3, 4)}, state={})
    with Checkpoint.open(path) as saved:
        with pytest.raises(CheckpointError, match="no tensor 'u'"):
            saved.read("u")
        for start, stop in [((0,), (3, 4)), ((0, 0), (4, 4)), ((2, 0), (1, 4)), ((-1, 0), (1, 1))]:
            with pytest.raises(CheckpointError, match="not a box"):
                saved.read("t", start, stop)
        with pytest.raises(CheckpointError, match="outside"):
            saved.read_flat("t", 3, 13)


def test_verifying_is_all_or_none(tmp_path: Path) -> None:
    path = Layout().save(tmp_path)
    bad = path / "rank_00002.safetensors"
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    with pytest.raises(CheckpointError, match="rank_00002.safetensors: damaged"):
        Checkpoint.open(path)
    Checkpoint.open(path, verify=False).close()


def in_slices(directory: Path, count: int) -> Path:
    """Save the tensor `t`, of which each of `count` ranks writes one entry to its file."""
    ranks = CheckpointRanks(count)

    def write(rank: int, gather: Any) -> Path:
        shard = LocalShard("t", torch.tensor([rank]), (count,), (rank,), (rank + 1,))
        sharing = {"rank": rank, "world": count, "gather": gather, "files": QuickFiles()}
        return save_checkpoint(directory, step=1, tensors=[shard], state={}, **sharing)

    return ranks.run(write)[0]


def test_an_error_while_reading_is_told(tmp_path: Path) -> None:
    path = in_slices(tmp_path, 2)
    with pytest.raises(CheckpointError, match="rank_00001.safetensors: cannot read"):
        with Checkpoint.open(path) as saved:
            (path / "rank_00001.safetensors").unlink()
            saved.read("t")


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    count = MOST_MAPS + 60
    path = in_slices(tmp_path, count)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + MOST_MAPS + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with Checkpoint.open(path) as saved:
            assert saved.read("t").tolist() == list(range(count))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_mask_that_does_not_fit_is_named(tmp_path: Path) -> None:
    mask = torch.tensor([True, False, True])
    shards = [whole("mask", mask), LocalShard("t", torch.zeros(1), (3,), (0,), (3,), mask="mask")]
    path = save_checkpoint(tmp_path, step=1, tensors=shards, state={})
    with (
        Checkpoint.open(path) as saved,
        pytest.raises(CheckpointError, match="key 't' has 1 entries, its mask 'mask' 2"),
    ):
        saved.read("t")


def test_saving_a_step_again(tmp_path: Path) -> None:
    said: list[str] = []

    def save(value: float) -> Path:
        tensors = {"t": torch.full((3,), value)}
        return save_checkpoint(tmp_path, step=1, tensors=tensors, state={}, log=said.append)

    path = save(1.0)
    before = path.stat().st_ino
    assert save(1.0) == path and path.stat().st_ino == before and said == []
    assert save(2.0) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step_00000001",
        "step_00000001.replaced-1",
    ]
    rewrite_manifest(path, lambda document: document.update(step="x"))
    save(2.0)
    save(3.0)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {
        "latest",
        "step_00000001",
        "step_00000001.replaced-1",
        "step_00000001.replaced-2",
        "step_00000001.damaged-1",
    }
    assert any("damaged" in line for line in said)
    with Checkpoint.open(path) as saved:
        assert saved.read("t").tolist() == [3.0] * 3
