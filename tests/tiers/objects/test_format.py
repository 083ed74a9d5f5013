"""The bytes in a bucket, as docs/format.md has them: golden, so that a change of format cannot go unnoticed."""

from __future__ import annotations

import hashlib

from kvtier.checksum import digest_of
from kvtier.identity.keys import SHARED, scope_of
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.pins import Pin, decode, encode
from kvtier.retention.terms import Terms
from kvtier.testing import chain_of, payload_of, sample_namespace
from kvtier.tiers.objects import deltas
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.names import ObjectNames

NS = sample_namespace(4096)
CHAIN = chain_of(NS, 4, seed=1)
LIFE = Lifetime.of(Terms("t", ttl=300, max_age=3600), 1_800_000_000.0)
DIGESTS = tuple(digest_of([payload_of(key, 4096)]) for key in CHAIN)
FRAME = Frame(NS.digest, SHARED, 0, 4096, tuple(key[16:] for key in CHAIN), DIGESTS, LIFE)


def sha(raw: bytes | bytearray) -> str:
    return hashlib.sha256(raw).hexdigest()[:24]


def test_names() -> None:
    names = ObjectNames("p", NS.digest)
    last = CHAIN[-1].hex()
    assert names.stride(CHAIN[-1]) == f"p/{NS.digest.hex()}/{'0' * 32}/{last[32:34]}/{last[32:]}"
    tombstone = names.tombstone(scope_of("tenant"), 1_800_000_000.5)
    assert tombstone == f"p/{NS.digest.hex()}/purged/{scope_of('tenant').hex()}-0006651728a02120"


def test_an_object_is_one_frame() -> None:
    raw = FRAME.encode() + b"".join(payload_of(key, 4096) for key in CHAIN)
    assert len(raw) == FRAME.total_bytes == 5 * 4096
    assert sha(raw) == "b289e0ab2947ba6a36a5c8cf"


def test_a_delta() -> None:
    entry = ObjectEntry(FRAME, FRAME.total_bytes, '"etag"', LIFE, LIFE.last_use, 0.0)
    assert sha(deltas.encode([entry])) == "bd368dfc5bc07f6142261634"


def test_a_pin() -> None:
    pin = Pin("name", tuple(CHAIN), 1_800_000_000.0, 1_800_086_400.0, 64)
    raw = encode([pin])
    assert decode(raw) == [pin]
    assert sha(raw) == "8e174f2f37a2717ff9164252"
