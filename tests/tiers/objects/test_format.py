"""The bytes in a bucket, as docs/format.md has them: golden, so that a change of format cannot go unnoticed."""

from __future__ import annotations

import hashlib

from kvtier.checksum import digest_of
from kvtier.identity.keys import SHARED, scope_of, tenant_of
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.pins import Pin, decode, encode
from kvtier.retention.terms import Terms
from kvtier.testing import chain_of, payload_of, sample_namespace
from kvtier.tiers.objects import delta_format, purge_log
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.signed import Signer
from tests.tiers.objects.support.old_delta import encode_old

NS = sample_namespace(4096)
CHAIN = chain_of(NS, 4, seed=1)
LIFE = Lifetime.of(Terms("t", ttl=300, max_age=3600), 1_800_000_000.0)
DIGESTS = tuple(digest_of([payload_of(key, 4096)]) for key in CHAIN)
FRAME = Frame(NS.digest, SHARED, 0, 4096, tuple(key[16:] for key in CHAIN), DIGESTS, LIFE, 17, salt=bytes(range(16)))
PUBLIC = Keyring.public()


def sha(raw: bytes | bytearray) -> str:
    return hashlib.sha256(raw).hexdigest()[:24]


def test_names() -> None:
    names = ObjectNames("p", NS.digest, PUBLIC)
    tenant, ns = "e3789c488bee7225a1a19e2bd1ee50de", "e8cfa50d5176108e32f5290cc7d9576f"
    unit = "1e3e58aa36f4154be1a20a0c9c5215489253dee8ad22cc237632345680d8a91b"
    assert names.unit(CHAIN[-1]) == f"p/units/{tenant}/{ns}/7ba5d08765357a670e464bf81508d7d7/1e/{unit}"
    assert names.entry(17) == f"p/ctl/{ns}/log/0000000000000011"
    assert names.pin("name") == f"p/ctl/{ns}/pins/4cd9203b0caf5e2e91782089630f1f2d"


def test_an_object_is_one_frame() -> None:
    raw = FRAME.encode(PUBLIC) + b"".join(payload_of(key, 4096) for key in CHAIN)
    assert len(raw) == FRAME.total_bytes == 5 * 4096
    assert sha(raw) == "c8561b17907aef0c98f105e3"


def test_a_delta() -> None:
    entry = ObjectEntry(FRAME, FRAME.total_bytes, '"etag"', LIFE, LIFE.last_use, 0.0)
    raw = delta_format.encode([entry.hint])
    assert sha(raw) == "789597d34bde3b68c148a248"
    assert list(delta_format.parse(raw, NS.digest, PUBLIC)) == [entry.hint._replace(size=20 << 10)]
    old = encode_old([entry], PUBLIC)
    assert sha(old) == "b2e23a12f54853453d54fe35"
    assert list(delta_format.parse(old, NS.digest, PUBLIC)) == [entry.hint]


def test_an_entry_of_the_purge_log() -> None:
    raw = purge_log.encode(17, bytes(range(16)), 3, {scope_of("tenant"): 17, SHARED: 5})
    tenants = {tenant_of(scope_of("tenant")): 17, SHARED: 5}
    assert purge_log.decode(raw, 17) == (bytes(range(16)), 3, tenants)
    assert sha(raw) == "b6cdd2e932c8559b7b7501b7"
    assert sha(Signer(PUBLIC, "p/").sign("p/ctl/log/1", raw)) == "cf7b5af907c108732ef199fd"


def test_a_pin() -> None:
    pin = Pin("name", tuple(CHAIN), 1_800_000_000.0, 1_800_086_400.0, 64)
    raw = encode([pin])
    assert decode(raw) == [pin]
    assert sha(raw) == "8e174f2f37a2717ff9164252"
