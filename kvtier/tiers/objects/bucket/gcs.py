"""A bucket of Google Cloud Storage through obstore.

A version is a generation there: conditions name it, and an ETag is one of the bytes. A listing has no generations, so
its ETags are the bytes'. Deletes compare versions first, and a use is recorded by writing the object again, as with S3
through obstore alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.errors import TierError
from kvtier.tiers.objects.bucket.obstore import ObstoreBucket
from kvtier.tiers.objects.bucket.protocol import TIER, Stat, Transient
from kvtier.times import Wall

DELETES_AT_ONCE = 10

_CHAIN = (None, "google_default")  # gcsfs's names of the library's own chain

_NO_TOKEN = (
    "no credentials to be had (tiers.g4.options.token, GOOGLE_APPLICATION_CREDENTIALS or the machine's service account)"
)


def translated(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """gcsfs options as obstore configuration, None if one has no counterpart. Pure."""
    token = options.get("token")
    if not {"token", "endpoint_url", "project"} >= options.keys() or not isinstance(token, str | None):
        return None
    out: dict[str, Any] = {"base_url": options.get("endpoint_url")}
    if token == "anon":
        out["skip_signature"] = True
    elif token not in _CHAIN:
        if not token.endswith(".json"):
            return None  # another way to log in, which gcsfs alone has
        out["application_credentials"] = token
    return {name: value for name, value in out.items() if value is not None}


class GcsBucket(ObstoreBucket):
    """One bucket. `config` is obstore's; without credentials in it, obstore's own chain has them (GOOGLE_… in the
    environment, the default credentials of gcloud, the machine's service account)."""

    _endpoint_key = "base_url"

    async def start(self) -> None:
        from obstore.store import GCSStore

        self._open(GCSStore, self._config)

    def _version(self, told: Mapping[str, Any]) -> str:
        return str(told["version"] or "") or self._etag(told["e_tag"])

    def _condition(self, etag: str) -> dict[str, str]:
        return {"version": etag}

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        if etag is not None and not etag.isdecimal():
            return None  # no generation: none of the versions that this replica has read
        return await super().replace(name, data, used, etag)

    async def delete_many(self, names: Sequence[str]) -> None:
        # The library stops at the first that is gone: other replicas sweep, too.
        for start in range(0, len(names), DELETES_AT_ONCE):
            await asyncio.gather(*(self.delete(name) for name in names[start : start + DELETES_AT_ONCE]))

    def _mapped(self, operation: str, error: Exception) -> TierError:
        if "token request" in str(error):
            return Transient(TIER, operation, _NO_TOKEN)
        return super()._mapped(operation, error)
