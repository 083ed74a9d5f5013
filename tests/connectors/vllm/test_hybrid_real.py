"""A real hybrid model in a real vLLM engine: KVTIER_REAL_MODEL names a Gemma 3 checkpoint, such as that of 270M.

Tokens are those of the engine's own hit at the same boundary, over a restart, too; every block that is loaded is
compared with the one that was stored.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import IDLE

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("KVTIER_REAL_MODEL" not in os.environ, reason="KVTIER_REAL_MODEL names no checkpoint"),
]

Start = Callable[..., Any]
BOS, BLOCK = 2, 32


def options(folder: Path | None) -> dict[str, Any]:
    tiers = {"g2": {"capacity": "256MiB"}, "g3": {"path": str(folder), "capacity": "1GiB"}}
    return {
        "model": os.environ["KVTIER_REAL_MODEL"],
        "config": None if folder is None else {"tiers": tiers},
        "engine": {"dtype": "bfloat16", "num_gpu_blocks_override": 400, "max_num_batched_tokens": 512},
    }


@pytest.fixture(scope="module")
def words() -> list[list[int]]:
    """Texts of some 700 tokens, in the model's vocabulary."""
    chance = random.Random(270)
    return [[BOS, *(chance.randrange(1000, 60000) for _ in range(700))] for _ in range(2)]


@pytest.fixture(scope="module")
def real(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("real") / "g3"
    engine = start(**options(folder))
    engine.watch_bytes()
    engine.folder = folder
    yield engine
    engine.kill()


def test_a_conversation_comes_back_and_after_a_restart(real: Any, start: Start, words: list[list[int]]) -> None:
    groups = real.groups()
    assert [kind for kind, _, _ in groups].count("SlidingWindowSpec") == len(groups) - 1 >= 5
    own, asked, history = [], [], words[0]
    for turn in range(2):
        asked.append(history)
        real.generate(prompts=[history], tokens=24)
        own.append(real.generate(prompts=[history], tokens=24)[0])  # the engine's own hit
        history = [*history, *own[-1]["tokens"], *words[1][100 * turn : 100 * turn + 90]]
    whole = [(len(one) - 1) // BLOCK * BLOCK for one in asked]
    assert [out["cached"] for out in own] == whole
    assert real.reset()
    warm = real.generate(prompts=[asked[1]], tokens=24)[0]
    assert warm["read"] == {"g2": whole[1]} and warm["tokens"] == own[1]["tokens"]
    watched = real.bytes_watched()
    assert watched["compared"] > 0 and watched["wrong"] == 0
    assert real.check() == IDLE and real.flush()["pending"] == 0
    chain = whole[1] // BLOCK
    for positions in (range(chain), range(-16 * (len(groups) - 1), 0)):  # the controls: zeros in all of one kind
        assert real.reset()
        real.break_loads(how="zeros", positions=list(positions))
        assert real.generate(prompts=[asked[1]], tokens=24)[0]["tokens"] != own[1]["tokens"]
        real.mend()
    other = start(**options(real.folder))
    again = [other.generate(prompts=[one], tokens=24)[0] for one in asked]
    assert [out["tokens"] for out in again] == [out["tokens"] for out in own]
    assert [out["cached"] for out in again] == whole
    assert again[0]["read"] == {"g3": whole[0]} and again[1]["read"]["g3"] > 0
    assert other.check() == IDLE
    assert other.stop() == 0
