"""Engines set up otherwise. Each test starts one or two, so all of it is long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import IDLE, prompt, tiers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Start = Callable[..., Any]


def round_trip(engine: Any, seeds: list[int]) -> None:
    """Cold, from the engine's own cache, from G2: the same tokens, one at a time and together."""
    prompts = [prompt(1, 500)] + [prompt(1, 500)[:300] + prompt(seed, 150) for seed in seeds]
    cold = [engine.generate(prompts=[p], control={"load": False})[0] for p in prompts]
    engine.sleep(seconds=1.0)
    assert engine.reset()
    warm = [engine.generate(prompts=[p])[0] for p in prompts]
    assert [out["tokens"] for out in warm] == [out["tokens"] for out in cold]
    assert warm[0]["read"] == {"g2": 480}


@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": "bfloat16"},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 128, "enable_prefix_caching": False},
    ],
    ids=lambda variant: "+".join(f"{name}={value}" for name, value in variant.items()),
)
def test_engines_set_up_otherwise_give_the_same_tokens(start: Start, tmp_path: Path, variant: dict[str, Any]) -> None:
    engine = start(config=tiers(tmp_path), processes="own", engine=variant)
    round_trip(engine, [2, 3])
    assert engine.stop() == 0


def test_without_prefix_caching_blocks_are_kept_until_they_are_copied_and_not_for_long(
    start: Start, tmp_path: Path
) -> None:
    """At most a quarter of the pool, at most `flush_timeout`; a copy that is later than that is not published."""
    off = {"enable_prefix_caching": False}
    engine = start(config=tiers(tmp_path), engine=off, arguments={"flush_timeout": "1s"})
    cold = engine.generate(prompts=[prompt(1)])
    assert engine.check() == IDLE and engine.resident(prompt=prompt(1))[0] == 9
    assert engine.reset(), "an idle engine has all its blocks back, so that it can also sleep"
    lost = engine.counters().get("spill_lost", 0)
    engine.hold_stores()
    for seed in (2, 3, 4):
        engine.generate(prompts=[prompt(seed)], tokens=2, settle=False)
    assert engine.check()["blocks_used"] == 30 and engine.counters().get("spill_lost", 0) == lost
    engine.generate(prompts=[prompt(5)], tokens=2, settle=False)
    assert engine.check()["blocks_used"] == 30 and engine.counters()["spill_lost"] > lost, "a quarter of 128 is kept"
    engine.sleep(seconds=1.1)
    engine.generate(prompts=[prompt(6, 1500)], tokens=2, settle=False, control={"store": False})
    assert engine.check()["blocks_used"] == 0
    engine.mend()
    engine.settle()
    assert [engine.resident(prompt=prompt(seed)) for seed in (2, 3, 4, 5)] == [[0, 0]] * 4
    assert engine.check() == IDLE
    warm = engine.generate(prompts=[prompt(1)])
    assert warm[0]["read"] == {"g2": 288} and warm[0]["tokens"] == cold[0]["tokens"]
    assert engine.stop() == 0


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_two_ranks_give_the_same_tokens_and_find_each_others_halves(
    start: Start, tmp_path: Path, caching: bool
) -> None:
    """Tensor parallelism: a block counts when both ranks have written their half; a fresh engine reads both."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    variant = {**ranks, "enable_prefix_caching": caching}
    engine = start(config=tiers(tmp_path), processes="own", engine=variant)
    round_trip(engine, [2, 3])
    assert engine.stop() == 0
    second = start(config=tiers(tmp_path), processes="own", engine=variant)
    warm = second.generate(prompts=[prompt(1, 500)])[0]
    cold = second.generate(prompts=[prompt(1, 500)], control={"load": False})[0]
    assert warm["read"] == {"g3": 480} and warm["tokens"] == cold["tokens"]
    assert second.stop() == 0


MLA = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 512}


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_latent_attention(start: Start, make_other: Callable[[str], Path], tmp_path: Path, caching: bool) -> None:
    """MLA keeps one latent per token instead of keys and values per head. On most CPUs its prefill does not go on right
    behind what is cached, so the tokens are those of the engine's own hit, or of another one's."""
    model, insisted = str(make_other("mla")), {**MLA, "enable_chunked_prefill": True, "enable_prefix_caching": True}
    asked, away = [prompt(seed) for seed in (1, 2, 3)], {"load": False, "store": False}
    plain = start(model=model, config=None, engine=insisted, insist=True)
    for _ in range(2):
        own = [plain.generate(prompts=[one], control=away)[0] for one in asked]
    plain.kill()
    insisted["enable_prefix_caching"] = caching
    engine = start(model=model, config=tiers(tmp_path), engine=insisted, insist=True)
    engine.watch_bytes()
    assert engine.namespace()["group"] == "mla"
    cold = [engine.generate(prompts=[one], control={"load": False})[0] for one in asked]
    assert engine.reset()
    warm = [engine.generate(prompts=[one])[0] for one in asked]
    assert [out["cached"] for out in (*cold, *own, *warm)] == [0] * 3 + [288] * 6
    assert [out["read"] for out in (*own, *warm)] == [{}] * 3 + [{"g2": 288}] * 3
    assert [out["tokens"] for out in warm] == [out["tokens"] for out in own], "as its own prefix hit"
    watched = engine.bytes_watched()
    assert watched["compared"] >= 3 * 18 and watched["wrong"] == 0
    assert engine.reset()
    engine.break_loads(how="zeros")
    assert engine.generate(prompts=asked[:1])[0]["tokens"] != own[0]["tokens"], "the control: zeros are noticed"
    engine.mend()
    assert engine.stop() == 0


def test_latent_attention_is_not_cached_where_the_engine_does_not_resume_it(
    start: Start, make_other: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM turns prefix caching off for it on a CPU without AMX, and has good reason to."""
    model, asked = str(make_other("mla")), [prompt(seed) for seed in (1, 2, 3)]
    plain = start(model=model, config=None, engine=MLA)
    right = [plain.generate(prompts=[one], settle=False)[0] for one in asked]
    if plain.generate(prompts=asked[:1], settle=False)[0]["cached"]:
        pytest.skip("this CPU's kernels resume it")
    plain.kill()
    engine = start(model=model, config=tiers(tmp_path), engine=MLA)
    assert not engine.has_cache() and any("in one piece" in line for line in engine.logs())
    for _ in range(2):
        outs = [engine.generate(prompts=[one], settle=False)[0] for one in asked]
        assert [out["tokens"] for out in outs] == [out["tokens"] for out in right]
        assert all(out["read"] == {} for out in outs)
    assert engine.stop() == 0


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("state", {"dtype": "bfloat16", "enable_prefix_caching": False}, 'states in mode "none"; start it with'),
        ("sliding", {"enable_prefix_caching": False}, "2 groups of KV cache with prefix caching off"),
        ("llama", {"prefix_caching_hash_algo": "xxhash"}, "start with --prefix-caching-hash-algo sha256_cbor"),
    ],
)
def test_what_is_not_served_is_refused_at_start_with_the_reason(
    start: Start,
    make_other: Callable[[str], Path],
    make_checkpoint: Callable[[int], Path],
    tmp_path: Path,
    kind: str,
    options: dict[str, Any],
    said: str,
) -> None:
    model = make_checkpoint(0) if kind == "llama" else make_other(kind)
    with pytest.raises(AssertionError, match=said):
        start(model=str(model), config=tiers(tmp_path), engine=options)


def test_adapters_share_nothing_and_a_retrained_one_misses(
    start: Start, write_adapter: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    """A LoRA adapter is named by its weights: the same path with other weights, under a new id, finds nothing."""
    path = write_adapter(tmp_path / "adapter", 1)
    engine = start(config=tiers(tmp_path), engine={"enable_lora": True, "max_lora_rank": 8, "max_loras": 4})
    plain = engine.generate(prompts=[prompt(1)])[0]
    first = engine.generate(prompts=[prompt(1)], adapter=["tuned", 1, str(path)])[0]
    assert first["read"] == {} and first["tokens"] != plain["tokens"]
    assert engine.reset()
    again = engine.generate(prompts=[prompt(1)], adapter=["tuned", 1, str(path)])[0]
    assert again["read"] == {"g2": 288} and again["tokens"] == first["tokens"]
    write_adapter(path, 2)
    assert engine.reset()  # the engine's own cache goes by the name alone
    retrained = engine.generate(prompts=[prompt(1)], adapter=["tuned", 2, str(path)])[0]
    assert retrained["read"] == {} and retrained["tokens"] != first["tokens"], "same name, same hashes, other weights"
    assert engine.reset()
    stale = engine.generate(prompts=[prompt(1)], adapter=["tuned", 1, str(path)])[0]
    assert stale["read"] == {}, "its files changed under the id it was loaded with: nobody knows what it is"
    assert engine.reset()
    assert engine.generate(prompts=[prompt(1)])[0]["tokens"] == plain["tokens"]
    assert engine.stop() == 0
    second = start(config=tiers(tmp_path), engine={"enable_lora": True, "max_lora_rank": 8, "max_loras": 4})
    for number, (seed, answer) in enumerate(((2, retrained), (1, first)), start=7):
        write_adapter(path, seed)
        assert second.reset()
        warm = second.generate(prompts=[prompt(1)], adapter=["tuned", number, str(path)])[0]
        assert warm["read"] == {"g3": 288}, "weights count, ids do not"
        assert warm["tokens"] == answer["tokens"]
    assert second.stop() == 0


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_as_one_of_several_connectors(start: Start, tmp_path: Path, caching: bool) -> None:
    """vLLM's MultiConnector makes the connector a child of its own."""
    variant = {"enable_prefix_caching": caching}
    engine = start(config=tiers(tmp_path), processes="own", several=True, engine=variant)
    round_trip(engine, [2, 3])
    assert engine.stop() == 0


def test_a_bad_copy_costs_time_and_no_request_under_vllms_default_policy_too(start: Start, tmp_path: Path) -> None:
    """vLLM's default, "fail", would end the request; the connector sets "recompute"."""
    engine = start(config=tiers(tmp_path), policy="fail")
    assert not any("kv_load_failure_policy" in line for line in engine.logs())
    prompts = [prompt(1), prompt(2), prompt(3)]
    cold = engine.generate(prompts=prompts)
    assert engine.reset()
    engine.break_loads(how="fail", positions=[4])
    warm = engine.generate(prompts=prompts)
    engine.mend()
    assert [out["finish"] for out in warm] == ["length"] * 3
    assert [out["tokens"] for out in warm] == [out["tokens"] for out in cold]
    assert engine.counters()["load_failures"]
    again = engine.generate(prompts=prompts)
    assert [out["tokens"] for out in again] == [out["tokens"] for out in cold]
    assert engine.stop() == 0


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_async_scheduling(start: Start, tmp_path: Path, caching: bool) -> None:
    """vLLM turns it off on CPUs; turned on against its will, steps are planned before the last one has completed."""
    variant = {"async_scheduling": True, "enable_prefix_caching": caching}
    engine = start(config=tiers(tmp_path), engine=variant, insist=True)
    assert engine.is_async()
    round_trip(engine, [2, 3])
    prompts = [prompt(30 + i, 630) for i in range(8)]
    cold = [engine.generate(prompts=[p], tokens=40)[0] for p in prompts]
    together = engine.generate(prompts=prompts, tokens=40)
    assert [out["tokens"] for out in together] == [out["tokens"] for out in cold]
    assert engine.reset()
    engine.break_loads(how="fail", positions=[4])
    assert engine.generate(prompts=prompts[:1], tokens=40)[0]["tokens"] == cold[0]["tokens"]
    engine.mend()
    for turn in range(40):  # aborted while a step with them runs: their blocks are handed out before it has ended
        engine.add(name=f"gone{turn}", prompt=prompt(60 + turn % 7, 700), tokens=30)
        engine.steps(count=turn % 4)
        if turn >= 3:
            engine.abort(name=f"gone{turn - 3}")
    engine.run_out()
    engine.settle()
    assert engine.check() == IDLE
    asked = [prompt(60 + i, 700) for i in range(7)]
    right = [engine.generate(prompts=[p], control={"load": False, "store": False})[0]["tokens"] for p in asked]
    assert engine.reset()
    found = engine.generate(prompts=asked)
    assert [out["tokens"] for out in found] == right and any(out["read"] for out in found)
    assert engine.stop() == 0


def test_new_weights_at_the_same_path_miss(start: Start, make_checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.symlink_to(make_checkpoint(0))
    first = start(model=str(path), config=tiers(tmp_path))
    old = first.generate(prompts=[prompt(1)])[0]
    assert first.stop() == 0
    path.unlink()
    path.symlink_to(make_checkpoint(1))
    second = start(model=str(path), config=tiers(tmp_path))
    new = second.generate(prompts=[prompt(1)])[0]
    assert new["read"] == {} and new["tokens"] != old["tokens"]
    assert second.stop() == 0
    path.unlink()
    path.symlink_to(make_checkpoint(0))
    third = start(model=str(path), config=tiers(tmp_path))
    back = third.generate(prompts=[prompt(1)])[0]
    assert back["read"] == {"g3": 288} and back["tokens"] == old["tokens"]


def test_a_second_engine_finds_the_firsts_blocks_in_object_storage(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    shared = {"g4": {"url": f"file://{tmp_path}/bucket/kv", "stride": 2}}
    first = start(config={"tiers": {"g2": {"capacity": "32MiB"}, **shared}})
    cold = first.generate(prompts=[prompt(1)])[0]
    first.flush()
    assert first.stop() == 0
    second = start(config={"tiers": {"g2": {"capacity": "32MiB"}, **shared}})
    warm = second.generate(prompts=[prompt(1)])[0]
    assert warm["read"].get("g4", 0) >= 256 and warm["tokens"] == cold["tokens"]
