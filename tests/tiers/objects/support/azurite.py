"""Azurite, Microsoft's emulator of Azure's blob storage, on loopback. From npm: `npm install -g azurite`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import urllib.request
from datetime import UTC, datetime
from uuid import uuid4

from kvtier.testing.servers import S3Server

ACCOUNT = "devstoreaccount1"
KEY = base64.b64encode(bytes(range(64))).decode()
_VERSION = "2021-12-02"


class Azurite(S3Server):
    """Speaks Azure's protocol instead of S3's."""

    program = wheel = "azurite-blob"  # no wheel has it

    @property
    def options(self) -> dict[str, object]:
        """fsspec options (adlfs's names) of this server."""
        return {"endpoint_url": f"{self.endpoint}/{ACCOUNT}", "account_name": ACCOUNT, "account_key": KEY}

    def new_bucket(self) -> str:
        name = f"kvtier-{uuid4().hex[:12]}"
        path = f"/{ACCOUNT}/{name}"
        at = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        lines = ["PUT", *[""] * 11, f"x-ms-date:{at}", f"x-ms-version:{_VERSION}", f"/{ACCOUNT}{path}"]
        signed = "\n".join([*lines, "restype:container"]).encode()
        tag = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed, hashlib.sha256)).decode()
        headers = {"x-ms-date": at, "x-ms-version": _VERSION, "Authorization": f"SharedKey {ACCOUNT}:{tag}"}
        asked = urllib.request.Request(f"{self.endpoint}{path}?restype=container", headers=headers, method="PUT")
        urllib.request.urlopen(asked, timeout=10).close()
        return f"az://{name}"

    def command(self) -> list[str]:
        (self._folder / "data").mkdir(exist_ok=True)
        return [
            "env", f"AZURITE_ACCOUNTS={ACCOUNT}:{KEY}", self.binary() or self.program, "--blobHost=127.0.0.1",
            f"--blobPort={self._ports[0]}", f"--location={self._folder}/data", "--skipApiVersionCheck", "--silent",
        ]  # fmt: skip
