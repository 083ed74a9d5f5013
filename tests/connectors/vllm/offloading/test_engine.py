"""kvtier under vLLM's own tiered offloading in a real engine: the same tokens out, whatever happens to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import prompt, tokens

pytestmark = pytest.mark.timeout(600)

IDLE = {"requests": 0, "pinned": 0, "quarantined": 0}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("tier")
    tiers = {"g2": {"capacity": "16MiB"}, "g3": {"path": str(root / "g3"), "capacity": "1GiB"}}
    return {"kvtier_config": {"tiers": tiers, "deadlines": {"lookup": "5s"}}}  # on a busy machine, too


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[Any]:
    engine = start(script="offloading_host.py", tier=arguments, events=True)
    yield engine
    if engine.process.poll() is None:  # one that is killed leaves vLLM's host cache in /dev/shm
        engine.stop()


def test_prompts_come_back_from_every_place(engine: Any, arguments: dict[str, Any]) -> None:
    """The GPU's blocks, vLLM's host cache, our memory, our disk; fault free, and with a disk that lies or hangs."""
    prompts = [prompt(1, 500), prompt(1, 500)[:300] + prompt(2, 150)]
    cold = [engine.generate(prompts=[p])[0] for p in prompts]
    own = [engine.generate(prompts=[p])[0] for p in prompts]
    assert own[0]["cached"] == 480 and tokens(own) == tokens(cold), "the engine's own prefix cache answers first"
    assert engine.reset()
    host = [engine.generate(prompts=[p])[0] for p in prompts]
    assert tokens(host) == tokens(cold) and engine.sources()["host"] > 0
    assert "disk" not in {name for name, count in engine.sources().items() if count}

    assert engine.forget()
    memory = [engine.generate(prompts=[p], control={"usage": True})[0] for p in prompts]
    assert tokens(memory) == tokens(cold) and memory[0]["cached"] == 480
    used = [one["answer"]["usage"] for one in memory]
    assert [one["cached_tokens"] for one in used] == [one["cached"] for one in memory]
    assert used[0]["by_tier"] == {"g2": 480} and used[1]["by_tier"]["g1"] > 0, "the engine has the second's beginning"

    assert engine.flush()["pending"] == 0 and engine.evict(tier="g2") > 0
    assert engine.forget()
    engine.generate(prompts=[prompt(3, 20)])  # events leave with the engine's steps
    reported = [event for event in engine.heard() if event["kind"] == "BlockStored" and event["medium"] == "STORAGE"]
    assert len({event["hashes"][0] for event in reported}) == 15 + 5
    assert {event["ownership"] for event in reported} == {None}, "routers drop events of owners that they do not know"
    disk = [engine.generate(prompts=[p])[0] for p in prompts]
    assert tokens(disk) == tokens(cold) and disk[0]["cached"] == 480
    reported = engine.sources()
    assert reported["vllm:kvtier_tokens_read:g3"] == 480 + 160 and reported["disk"] > 0
    assert engine.idle() == IDLE

    assert engine.evict(tier="g2") > 0 and engine.forget()
    assert engine.corrupt(folder=arguments["kvtier_config"]["tiers"]["g3"]["path"]) > 0
    damaged = [engine.generate(prompts=[p])[0] for p in prompts]
    assert tokens(damaged) == tokens(cold) and damaged[0]["cached"] == 0
    assert engine.idle() == IDLE

    assert engine.flush()["pending"] == 0 and engine.evict(tier="g2") > 0 and engine.forget()
    engine.patience(lookup_deadline=0.2)
    engine.sicken(tier="g3", how="hang")
    hung = [engine.timed(prompts=[p], tokens=24) for p in prompts]
    assert [out["tokens"][0] for out in hung] == tokens(cold)
    assert max(out["seconds"] for out in hung) < 20
    engine.sicken(tier="g3", how="")


def test_wrong_bytes_would_be_noticed(engine: Any) -> None:
    """The control: the same way with zeros in the host cache's rows changes the tokens."""
    right = engine.generate(prompts=[prompt(3)])
    assert engine.reset()
    engine.zero_host()
    assert tokens(engine.generate(prompts=[prompt(3)])) != tokens(right)


def test_salts_share_nothing_and_senders_get_answers(engine: Any) -> None:
    """vLLM's tiers do not hear of salts, pins and senders; under kvtier's offloading connector they do."""
    asked = {"pin": {"name": "manual", "ttl": "1h"}}
    cold = engine.generate(prompts=[prompt(7)], salt="one", control=asked)[0]
    assert "refused" not in cold["answer"]["pin"]
    assert engine.forget()
    assert engine.generate(prompts=[prompt(7)], salt="two")[0]["read"] == {}
    assert engine.forget()
    warm = engine.generate(prompts=[prompt(7)], salt="one", control={**asked, "compared_with": cold["id"]})[0]
    assert warm["tokens"] == cold["tokens"] and warm["answer"]["same_tokens"] == 288
    assert warm["read"] == {"g2": 288}
    assert [blocks for name, blocks in engine.pins(count=1).items() if name.endswith("/manual")] == [9]
    engine.unpin()
    assert engine.forget() and engine.purge(salt="one") > 0
    assert engine.generate(prompts=[prompt(7)], salt="one")[0]["read"] == {}
    assert engine.forget()
    assert engine.generate(prompts=[prompt(7)], salt="two")[0]["read"] == {"g2": 288}, "the control"


@pytest.mark.long
def test_adapters_are_told_apart_by_their_weights_and_salts_may_be_required(
    start: Callable[..., Any], write_adapter: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    """A retrained adapter at the same path, under the same name, has the same hashes in vLLM."""
    path = write_adapter(tmp_path / "adapter", 1)
    tiers = {"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB"}}
    engine = start(
        script="offloading_host.py",
        tier={"kvtier_config": {"tiers": tiers, "security": {"salt": "deny"}}},
        engine={"enable_lora": True, "max_lora_rank": 8, "max_loras": 4},
    )
    plain = engine.generate(prompts=[prompt(8)], salt="s")[0]
    first = engine.generate(prompts=[prompt(8)], salt="s", adapter=["tuned", 1, str(path)])[0]
    assert first["read"] == {} and first["tokens"] != plain["tokens"]
    assert engine.forget()
    again = engine.generate(prompts=[prompt(8)], salt="s", adapter=["tuned", 1, str(path)])[0]
    assert again["read"] == {"g2": 288} and again["tokens"] == first["tokens"]
    write_adapter(path, 2)
    assert engine.forget()
    retrained = engine.generate(prompts=[prompt(8)], salt="s", adapter=["tuned", 2, str(path)])[0]
    assert retrained["read"] == {} and retrained["tokens"] != first["tokens"]
    for _ in range(2):
        assert engine.forget()
        assert engine.generate(prompts=[prompt(8)])[0]["read"] == {}, "security.salt is deny"
    assert engine.stop() == 0


@pytest.mark.long
def test_a_fresh_process_finds_what_the_last_one_wrote(
    engine: Any, start: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    cold = engine.generate(prompts=[prompt(4)])
    assert engine.stop() == 0
    second = start(script="offloading_host.py", tier=arguments, processes="own")
    warm = second.generate(prompts=[prompt(4)])
    assert tokens(warm) == tokens(cold) and warm[0]["cached"] == 288
    assert second.stop() == 0


@pytest.mark.long
def test_new_weights_at_the_same_path_miss(
    start: Callable[..., Any], arguments: dict[str, Any], make_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(make_checkpoint(0), model)
    first = start(script="offloading_host.py", tier=arguments, model=str(model))
    first.generate(prompts=[prompt(5)])
    assert first.stop() == 0
    shutil.rmtree(model)
    shutil.copytree(make_checkpoint(1), model)
    second = start(script="offloading_host.py", tier=arguments, model=str(model))
    assert second.generate(prompts=[prompt(5)])[0]["cached"] == 0
    assert second.stop() == 0


def test_weights_that_are_loaded_in_place_take_the_old_blocks_away(
    start: Callable[..., Any], make_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """vLLM tells nobody: its own prefix cache is reset, its host cache and the tiers below are not."""
    tiers = {"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB"}}
    engine = start(script="offloading_host.py", tier={"kvtier_config": {"tiers": tiers}})
    asked = [prompt(1), prompt(2)]
    old = engine.generate(prompts=asked)
    assert engine.forget()
    assert [out["read"] for out in engine.generate(prompts=asked)] == [{"g2": 288}] * 2, "the control"
    engine.add(name="over", prompt=prompt(4))
    engine.steps(count=3)
    engine.reload(path=str(make_checkpoint(1)))
    engine.run_out()
    engine.settle()
    assert engine.reset()
    new = engine.generate(prompts=[*asked, prompt(4)])
    assert [(out["read"], out["cached"]) for out in new] == [({}, 0)] * 3
    assert engine.settled() and engine.forget()
    right = engine.generate(prompts=[*asked, prompt(4)], control={"load": False, "store": False})
    assert tokens(new) == tokens(right) and tokens(new)[:2] != tokens(old)
    engine.generate(prompts=[prompt(3)])
    assert engine.forget()
    assert engine.generate(prompts=[prompt(3)])[0]["read"] == {"g2": 288}, "what was stored since is the new weights'"
    assert engine.reset(connector=True) and engine.reset(connector=True)
    assert engine.settled() and engine.idle() == IDLE
    assert engine.stop() == 0


@pytest.mark.long
def test_blocks_of_old_weights_are_not_loaded_with_the_first_step(
    start: Callable[..., Any], make_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """The scheduler learns of new weights with the first step, which it plans as before: its loads are computed."""
    tiers = {"g2": {"capacity": "16MiB"}}
    engine = start(script="offloading_host.py", tier={"kvtier_config": {"tiers": tiers}})
    engine.generate(prompts=[prompt(1)])
    engine.reload(path=str(make_checkpoint(1)))
    assert engine.reset()
    new = engine.generate(prompts=[prompt(1)])
    assert engine.reset() and engine.settled()
    warm = engine.generate(prompts=[prompt(1)])
    assert engine.forget()
    right = engine.generate(prompts=[prompt(1)], control={"load": False, "store": False})
    assert tokens(new) == tokens(right) and tokens(warm) == tokens(right)
    assert engine.stop() == 0


@pytest.mark.long
def test_a_model_whose_prompts_attend_to_later_tokens_is_not_cached(start: Callable[..., Any], prefix_lm: Any) -> None:
    """vLLM turns its prefix cache off, and not its offloading."""
    options, prompts, right = prefix_lm
    tiers = {"g2": {"capacity": "16MiB"}}
    engine = start(script="offloading_host.py", tier={"kvtier_config": {"tiers": tiers}}, **options)
    for _ in range(2):
        assert tokens([engine.generate(prompts=[p])[0] for p in prompts]) == right
    assert any("attend to later ones" in line for line in engine.logs())
    assert engine.stop() == 0


@pytest.mark.long
def test_an_adapter_is_what_the_worker_loaded(
    start: Callable[..., Any], write_adapter: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    """Its files are overwritten between the engine's loading and its first request."""
    path, lora = tmp_path / "adapter", {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4}
    tiers = {"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB"}}
    given = {"script": "offloading_host.py", "tier": {"kvtier_config": {"tiers": tiers}}, "engine": lora}
    engine, adapter = start(**given), ["tuned", 1, str(path)]
    assert engine.load_adapter(adapter=["tuned", 1, str(write_adapter(path, 1))])
    write_adapter(path, 2)
    old = engine.generate(prompts=[prompt(1), prompt(2)], adapter=adapter)
    engine.generate(prompts=[prompt(3)], adapter=adapter)
    assert engine.flush()["pending"] == 0 and engine.stop() == 0
    second = start(**given)
    new = second.generate(prompts=[prompt(1), prompt(2)], adapter=adapter)
    assert [out["read"] for out in new] == [{}, {}] and tokens(new) != tokens(old)
    assert second.flush()["pending"] == 0 and second.stop() == 0
    write_adapter(path, 1)
    third = start(**given)
    assert third.load_adapter(adapter=adapter)
    write_adapter(path, 2)
    refused = third.generate(prompts=[prompt(1), prompt(2)], adapter=adapter)
    assert tokens(refused) == tokens(old), "the tiers hold the other's blocks"
    assert third.stop() == 0


@pytest.mark.long
def test_many_requests_over_a_host_cache_that_is_too_small(start: Callable[..., Any], tmp_path: Path) -> None:
    """Eviction from vLLM's host cache, from our memory and preemption at once; then the same with an unsteady disk."""
    tiers = {"g2": {"capacity": "4MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB"}}
    engine = start(script="offloading_host.py", tier={"kvtier_config": {"tiers": tiers}}, host_bytes=2 << 20)
    prompts = [prompt(30 + i % 12, 400 + 32 * (i % 5)) for i in range(60)]
    cold = [engine.generate(prompts=[p])[0] for p in prompts]
    together = engine.generate(prompts=prompts)
    assert tokens(together) == tokens(cold)
    assert engine.sources()["vllm:kvtier_tokens_read:g3"] > 0
    engine.sicken(tier="g3", how="error")
    assert tokens(engine.generate(prompts=prompts)) == tokens(cold)
    engine.sicken(tier="g3", how="")
    assert engine.idle() == IDLE
    assert engine.stop() == 0


@pytest.mark.long
def test_chunks_of_several_blocks(start: Callable[..., Any], tmp_path: Path) -> None:
    tiers = {"g2": {"capacity": "16MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB"}}
    transfer = {"blocks_per_chunk": 2}
    engine = start(script="offloading_host.py", tier={"kvtier_config": {"tiers": tiers}}, extra=transfer)
    cold = engine.generate(prompts=[prompt(6, 500)])
    assert engine.forget()
    warm = engine.generate(prompts=[prompt(6, 500)])
    assert tokens(warm) == tokens(cold) and warm[0]["cached"] == 448
    assert engine.stop() == 0
