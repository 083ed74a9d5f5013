"""A container of Azure's blob storage through obstore. Deletes compare versions first, and a use is recorded by writing
the object again, as with S3 through obstore alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.tiers.objects.bucket.obstore import ObstoreBucket

DELETES_AT_ONCE = 256
"""Names in one request: as many as a batch may have there."""

# adlfs's names of options that both libraries have.
_NAMES = {
    "account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key", "tenant_id": "tenant_id",
    "client_id": "client_id", "client_secret": "client_secret", "endpoint_url": "endpoint",
}  # fmt: skip


def translated(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """adlfs options as obstore configuration, None if one has no counterpart. Pure."""
    if not _NAMES.keys() >= options.keys():
        return None
    return {_NAMES[name]: value for name, value in options.items() if value is not None}


class AzureBucket(ObstoreBucket):
    """One container. `config` is obstore's; without an account or credentials in it, obstore's own chain has them
    (AZURE_STORAGE_… in the environment, a workload or managed identity)."""

    _used = "kvtier_used"  # metadata have names of identifiers there

    async def start(self) -> None:
        from obstore.store import AzureStore

        self._open(AzureStore, self._config)

    def _etag(self, told: str | None) -> str:
        # A listing leaves out the quotes that a condition needs.
        return f'"{told}"' if told and not told.startswith('"') else told or ""

    async def delete_many(self, names: Sequence[str]) -> None:
        # One request at a time: of several, the library abandons the rest when the first has a name that is gone.
        for start in range(0, len(names), DELETES_AT_ONCE):
            await super().delete_many(names[start : start + DELETES_AT_ONCE])
