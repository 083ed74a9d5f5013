"""Dynamo's own indexer, fed by a real SGLang engine, knows of each prompt how far it is in which tier."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.announcer import WRITE_S
from tests.connectors.support.adapters import write_adapter
from tests.connectors.vllm.support.indexer import HOW, PYTHON, Indexer, free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON, reason=HOW),
]

PAGE, WHOLE = 16, 24 * 16
LORA = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"],
        "lora_backend": "torch_native", "max_loras_per_batch": 2}  # fmt: skip


class Routed:
    """An engine and the indexer that hears it. G1 holds two prompts of 24 pages and G2 five."""

    def __init__(self, serve: Callable[..., Any], prompt: Any, adapter: Path, folder: Path, form: str) -> None:
        self._serve, self._prompt, self._folder, self._spent = serve, prompt, folder, 500
        events, replay = free_port(), free_port()
        publisher = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        published = json.dumps({**publisher, **({"format": form} if form else {})})
        lora = {**LORA, "lora_paths": {"tuned": str(adapter)}}
        self._arguments = {**lora, "kv_events_config": published, "max_total_tokens": 1024}
        self._heard = (f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", PAGE, folder / "indexer.log")
        self.begin()
        self.indexer = Indexer(*self._heard)

    def begin(self) -> None:
        """The engine, again over what the last one left on the disk."""
        tiers = {"g2": {"capacity": "3MiB"}, "g3": {"path": str(self._folder / "g3"), "capacity": "256MiB"}}
        self.engine = self._serve(tiers, arguments=self._arguments, linker={"can_fail": False})

    def listen_anew(self) -> None:
        """A router that starts: it knows nothing but what is sent again."""
        self.indexer.close()
        self.indexer = Indexer(*self._heard)

    def step(self) -> None:
        """Events leave with the engine's steps, and a lost one is noticed with the next."""
        self._spent += 1
        self.settle()
        self.engine.host.generate(self._prompt(self._spent, PAGE + 1), new=1)
        self.settle()
        self.engine.host.generate([5], new=1)

    def settle(self) -> None:
        """Pages of a request are stored after its answer, so a flush may find one that has just begun."""
        for _ in range(50):
            if self.engine.order("flush") == 0:
                return
            time.sleep(0.1)
        raise AssertionError("blocks stay on their way down")

    def agree(self, prompts: list[list[int]], salt: str | None = None, adapter: str | None = None) -> list[list[int]]:
        """What the indexer knows of these prompts, once that of G2 and G3 is what the engine has there: both count on
        from where G1 ends, which the engine's own events say."""
        asked = {name: value for name, value in (("cache_salt", salt), ("lora_name", adapter)) if value}
        deadline = time.monotonic() + 30
        while True:
            self.step()
            known = [self.indexer.known(one, **asked) for one in prompts]
            held = [self.engine.order("places", tokens=one, salt=salt, adapter=adapter) for one in prompts]
            right = [[g1, *depths(g1, places)] for (g1, _, _), places in zip(known, held, strict=True)]
            if known == right:
                return known
            assert time.monotonic() < deadline, (known, right)
            time.sleep(0.1)


def depths(reached: int, places: dict[str, list[bool]]) -> list[int]:
    out = []
    for tier in ("g2", "g3"):
        while reached < WHOLE and places[tier][reached // PAGE]:
            reached += PAGE
        out.append(reached)
    return out


@pytest.fixture(params=["", "dynamo"])
def routed(request: Any, serve: Any, prompt: Any, tmp_path: Path) -> Iterator[Routed]:
    adapter = write_adapter(tmp_path / "adapter", 1, layers=3, width=128)
    here = Routed(serve, prompt, adapter, tmp_path, request.param)
    yield here
    here.indexer.close()


def test_the_indexer_knows_every_tier_of_an_engine_and_of_the_next_one(routed: Routed, prompt: Any) -> None:
    """After stores, evictions, promotions and a purge, and restarts of the router and of the engine on a warm G3; of
    salted requests and of an adapter's, too."""
    prompts, asked = [prompt(seed) for seed in range(9)], [prompt(40)]
    generate = routed.engine.host.generate
    for one in prompts:
        generate(one, new=1)
        routed.settle()  # G2 has five of them: more at a time may be refused by a slow disk
    told = routed.agree(prompts)
    held = [sum(counts) for counts in zip(*told, strict=True)]
    assert held[0] < held[1] < held[2] == 9 * WHOLE, "some in G1, more in G2, and all in G3"
    assert routed.engine.order("evict", tier="g2") > 0
    assert all(g2 == g1 for g1, g2, _ in routed.agree(prompts))
    for one in prompts[:4]:
        generate(one, new=1)
    assert any(g2 > g1 for g1, g2, _ in routed.agree(prompts)), "what came back from G3 is in G2"

    generate(*asked, new=1, cache_salt="tenant")
    generate(*asked, new=1, lora_path=["tuned"])
    assert routed.agree(asked, salt="tenant")[0][2] == WHOLE == routed.agree(asked, adapter="tuned")[0][2]
    assert routed.agree(asked) == [[0, 0, 0]] == routed.agree(asked, salt="other")

    routed.listen_anew()
    assert all(g3 == WHOLE for _, _, g3 in routed.agree(prompts))
    assert routed.agree(asked, salt="tenant")[0][2] == WHOLE == routed.agree(asked, adapter="tuned")[0][2]

    # SGLang kills its scheduler (kill_process_tree), so no linker is closed: what requests held within the last WRITE_S
    # is not written down, and not announced after a restart.
    time.sleep(WRITE_S + 2)
    routed.begin()
    routed.listen_anew()  # it drops batches that are numbered from 0 again
    assert routed.agree(prompts) == [[0, 0, WHOLE]] * 9, "before any request for them"
    assert routed.agree(asked, salt="tenant") == [[0, 0, WHOLE]] == routed.agree(asked, adapter="tuned")
    assert routed.agree(asked) == [[0, 0, 0]]
    (answer,) = routed.engine.host.generate(*asked, new=1, cache_salt="tenant")
    assert answer["host"] == WHOLE
    assert routed.agree(asked, salt="tenant") == [[WHOLE, WHOLE, WHOLE]]
    assert routed.engine.order("purge", salt="tenant") > 0
    assert routed.agree(asked, salt="tenant")[0] == [WHOLE] * 3, "G1 is the engine's"
    for one in prompts[:3]:
        routed.engine.host.generate(one, new=1)
    assert routed.agree(asked, salt="tenant") == [[0, 0, 0]]
    assert routed.agree(asked, adapter="tuned") == [[0, 0, WHOLE]]
