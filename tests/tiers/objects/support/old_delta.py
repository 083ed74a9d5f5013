"""Deltas as releases before fingerprints wrote them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvtier.keyring import Keyring
from kvtier.tiers.objects.index import ObjectEntry


def encode_old(entries: Sequence[ObjectEntry], keyring: Keyring) -> bytearray:
    """The body of one in version 2."""
    out = bytearray(struct.pack("<8sHHI", b"KVTDELTA", 2, 0, len(entries)))
    for entry in entries:
        header, etag = entry.frame.encode(keyring).rstrip(b"\0"), entry.etag.encode()
        out += struct.pack("<IHd", len(header), len(etag), entry.life.last_use) + header + etag
    return out
