"""NVIDIA Dynamo's own indexer of KV events, as a process beside the engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("KVTIER_DYNAMO_PYTHON", "")
HOW = (
    "set KVTIER_DYNAMO_PYTHON to an interpreter with Dynamo's indexer: python -m venv DIR && "
    "DIR/bin/pip install --no-deps ai-dynamo-runtime && DIR/bin/pip install uvloop 'pydantic<2.14'"
)
START_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Indexer:
    """One worker's blocks, as a router of Dynamo knows them. `replay` names the worker's replay endpoint, of which the
    indexer asks for what it has missed."""

    def __init__(self, events: str, replay: str, block_tokens: int, log: Path) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    urllib.request.urlopen(f"{self._url}/health", timeout=2).close()
                    break
                except OSError:
                    assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
            worker = {"instance_id": 1, "model_name": "tiny", "block_size": block_tokens, "endpoint": events}
            self._post("/register", {**worker, "replay_endpoint": replay})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _post(self, path: str, body: Any) -> Any:
        asked = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.loads(answer.read() or b"null")

    def known(self, tokens: list[int], **request: Any) -> list[int]:
        """Leading tokens of this prompt that the worker has: on the GPU, then on from there in host memory, then on
        from there on disk. `request`: `lora_name`, `cache_salt`."""
        found = self._post("/query", {"token_ids": tokens, "model_name": "tiny", **request})["instances"].get("1", {})
        return [found.get(tier, 0) for tier in ("gpu", "cpu", "disk")]
