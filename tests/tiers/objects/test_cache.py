"""G4 under the whole cache: one replica's prompt is served to another that shares nothing with it but the bucket."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import KVTierError
from kvtier.testing import payload_of, sample_namespace
from kvtier.testing.faults_s3 import FaultyS3, S3Fault, S3Rule
from kvtier.testing.servers import S3Server

BLOCK = 64 << 10
NS = sample_namespace(BLOCK)
TOKENS = list(range(16 * 32))

WRITER = """
import json, sys
import kvtier
from kvtier.testing import payload_of, sample_namespace
ns = sample_namespace(64 << 10)
config = kvtier.Config.parse(json.loads(sys.argv[1]))
with kvtier.open(config, ns) as cache:
    keys = kvtier.chain_hashes(list(range(16 * 32)), ns, salt="tenant")
    accepted = cache.put(keys, [payload_of(key, ns.block_bytes) for key in keys], wait=True)
    print(json.dumps([accepted, cache.flush(timeout=60).durable]))
"""


def config(folder: Path, url: str, options: Mapping[str, object]) -> dict[str, object]:
    return {
        "tiers": {
            "g2": {"capacity": "8MiB"},
            "g3": {"path": str(folder), "capacity": "32MiB"},
            "g4": {"url": url, "options": dict(options), "stride": 8},
        },
        "deadlines": {"lookup": "5s"},
    }


@pytest.mark.parametrize("place", ["directory", "seaweedfs"])
def test_a_second_process_is_served_from_g4(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url, options = f"file://{tmp_path}/bucket", {}
    if place == "seaweedfs":
        server: S3Server = request.getfixturevalue("seaweedfs")
        url, options = f"{server.new_bucket()}/p", dict(server.options)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WRITER, json.dumps(config(tmp_path / "a", url, options))],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    accepted, durable = json.loads(done.stdout)
    assert accepted == 32 and durable["g4"] == 32, (accepted, durable)
    keys = kvtier.chain_hashes(TOKENS, NS, salt="tenant")
    with kvtier.open(kvtier.Config.parse(config(tmp_path / "b", url, options)), NS) as cache:
        assert cache.match(keys) == 32
        with cache.get(keys, timeout=30) as hit:
            assert list(hit.tiers) == ["g4"] * 32
            assert [bytes(block) for block in hit.blocks] == [payload_of(key, BLOCK) for key in keys]
        other = kvtier.chain_hashes(TOKENS, NS, salt="another")
        assert cache.match(other) == 0
        cache.purge(salt="tenant")
        assert cache.match(keys) == 0
    with kvtier.open(kvtier.Config.parse(config(tmp_path / "a", url, options)), NS) as cache:
        assert cache.match(keys) == 0, "purged for the replica that stored it, on its own disk too"


def test_a_server_that_stalls_costs_the_lookup_s_budget_and_heals(tmp_path: Path) -> None:
    """No answer, ever: `match` waits for its budget a few times, then the breaker spares it even that; what was put
    meanwhile is served from above; after the server healed, G4 takes and serves again within 30 seconds."""
    (tmp_path / "a").mkdir()
    with FaultyS3().running() as server:
        raw = config(tmp_path / "a", "s3://bucket/p", server.options)
        raw["deadlines"] = {"lookup": "200ms"}
        with kvtier.open(kvtier.Config.parse(raw), NS) as cache:
            keys = kvtier.chain_hashes(TOKENS, NS)
            blocks = [payload_of(key, BLOCK) for key in keys]
            server.rules = [S3Rule("*", S3Fault.STALL)]
            other = kvtier.chain_hashes([7, *TOKENS], NS)
            waits = []
            for _ in range(12):
                began = time.monotonic()
                assert cache.match(other) == 0
                waits.append(time.monotonic() - began)
            assert max(waits) < 10, waits
            assert min(waits) < 0.2, "the breaker never opened"
            assert cache.put(keys, blocks, wait=True) == len(keys)
            assert cache.match(keys) == len(keys)
            server.rules = []
            give_up = time.monotonic() + 60
            while not any("/p/" in name and "/delta/" not in name for name in server.objects):
                assert time.monotonic() < give_up, "G4 took nothing within a minute of its server's return"
                fresh = kvtier.chain_hashes([int(1000 * time.monotonic()), *TOKENS], NS)
                cache.put(fresh, [payload_of(key, BLOCK) for key in fresh], wait=True)
                time.sleep(0.5)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_no_credential_reaches_a_log_a_dump_or_an_error(
    tmp_path: Path, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Through good and bad answers, with our own loggers at their most talkative."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="kvtier")
    more = {"key": "AKIDTOPSECRET", "secret": "verytopsecret"}
    if client == "s3fs":  # obstore is refused with a session token
        more["token"] = "sessiontopsecret"
    (tmp_path / "a").mkdir()
    with FaultyS3().running() as server:
        raw = config(tmp_path / "a", "s3://bucket/p", {**server.options, **more})
        raw["tiers"]["g4"]["client"] = client
        parsed = kvtier.Config.parse(raw)
        told = [repr(parsed), json.dumps(parsed.model_dump(mode="json"))]
        with kvtier.open(parsed, NS) as cache:
            keys = kvtier.chain_hashes(TOKENS, NS)
            cache.put(keys, [payload_of(key, BLOCK) for key in keys], wait=True)
            cache.flush(timeout=20)
            assert cache.stats()["g4"]["blocks"] == len(keys)
            for fault in (S3Fault.STATUS_403, S3Fault.EXPIRED, S3Fault.REDIRECT, S3Fault.GARBAGE, S3Fault.STATUS_503):
                server.rules = [S3Rule("*", fault)]
                cache.evict("g2"), cache.evict("g3"), cache.evict("g4")
                cache.get(keys, timeout=1).release()
                with contextlib.suppress(KVTierError):
                    cache.purge(salt="x")
            told += [repr(cache), json.dumps(cache.stats(), default=str)]
    assert caplog.records, "the control: something was logged"
    for secret in more.values():
        assert not [text for text in (*told, caplog.text) if secret in text]
