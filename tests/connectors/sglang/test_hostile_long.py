"""1,000 requests of a hostile client against SGLang's server over HTTP."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.connectors.sglang.support.served import forget_pages, served
from tests.connectors.support import hostile

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PAGE, PAGES = 16, 128  # tokens; of G2 and of G3
PAGE_BYTES = 3 * 2 * PAGE * 2 * 32 * 4  # layers, K and V, tokens, KV heads, their width, float32


def test_a_thousand_hostile_requests_cost_nobody_else_anything(
    model: Path, prompt: Any, ports: Any, tmp_path: Path
) -> None:
    """The engine lives, each action is answered, no tenant has more than its share, and the victim keeps its own."""
    room = PAGES * PAGE_BYTES
    config = {"version": 1, "tiers": {"g2": {"capacity": room}, "g3": {"path": str(tmp_path / "g3"), "capacity": room}}}
    linker = {
        "linker": "KVTierLinker",
        "linker_module_path": "kvtier.connectors.sglang",
        "linker_extra_config": {"kvtier_config": config, "recompute": "never"},
    }
    with served(model, *ports(1), "--page-size", str(PAGE), "--sleep-on-idle", linker=linker) as ask:

        def send(tokens: list[int], salt: str, params: dict[str, Any]) -> Any:
            sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True, "custom_params": params}
            return json.loads(ask("/generate", {"input_ids": tokens, "cache_salt": salt, "sampling_params": sampling}))

        def told(answer: Any) -> dict[str, Any]:
            """kvtier's part."""
            (found,) = answer["meta_info"].get("kvtier") or [{}]
            return dict(found or {})

        def metric(kind: str) -> float:
            found = re.search(rf"^sglang:kvtier_promises\{{.*kind=\"{kind}\".*\}} (\S+)$", ask("/metrics"), re.M)
            assert found is not None
            return float(found[1])

        own = prompt(1, 8 * PAGE + 1)
        pin = {"name": hostile.VICTIM["pin"], "ttl": "1h"}
        first = send(own, "victim", {"kvtier": {"session": hostile.VICTIM["session"], "pin": pin}})
        assert "refused" not in told(first)["pin"]

        def attack(seed: int) -> tuple[int, int]:
            asked = hostile.parameters(seed)
            try:
                answer = send(hostile.prompts(seed, own, 3 * PAGE + 1), "attacker", asked)
            except HTTPError as error:
                assert error.code < 500 or not hostile.is_carried(asked), (asked, error.read())
                return 0, 0
            return 1, hostile.check_answer(asked, told(answer).get("hints", []))

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(attack, hostile.seeds()))
        served_, answered = map(sum, zip(*done, strict=True))
        assert served_ > 400 and answered > 700, "SGLang itself refuses JSON with NaN or infinity"
        time.sleep(1.1)  # the tiers' figures are asked for once a second, by a batch
        send(prompt(3, 2 * PAGE), "other", {})
        assert metric("pinned") >= 8 and metric("pinned") + metric("guaranteed") <= PAGES // 2, "what may be reserved"
        forget_pages(ask)
        again = send(own, "victim", {})
        assert sum(told(again)["tokens_read"].values()) == 8 * PAGE, "its pin holds"
        assert again["output_ids"] == first["output_ids"]
        assert not told(send(own, "stranger", {})).get("tokens_read")
