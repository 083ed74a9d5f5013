"""Names of objects, the search for the end of a chain, and the life that blocks of one object share."""

from __future__ import annotations

import math

import pytest

from kvtier.identity.keys import SHARED, BlockKey, scope_of
from kvtier.keyring import Key, Keyring
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.terms import Depth
from kvtier.tiers.objects import strides
from kvtier.tiers.objects.names import ObjectNames, fingerprint_of


@pytest.mark.parametrize(
    ("block_bytes", "stride"), [(2 << 20, 16), (5 << 20, 6), (64 << 20, 1), (4096, 16), (1, 16), (1 << 32, 1)]
)
def test_a_stride_is_about_32_mib(block_bytes: int, stride: int) -> None:
    assert strides.default_stride(block_bytes) == stride


def test_names_parse_back_and_nothing_else_does() -> None:
    names = ObjectNames("some/prefix", bytes(range(32)), Keyring.public())
    last = BlockKey(bytes(range(16)) + bytes(range(100, 132)))
    name, entry = names.unit(last), names.entry(17)
    assert name.startswith("some/prefix/units/") and names.is_unit(name)
    assert names.fingerprint(last) == fingerprint_of(name)
    assert names.parse_entry(entry) == 17
    other = ObjectNames("some/prefix", bytes(32), Keyring.public()).unit(last)
    at = name.rindex("/") + 1
    for wrong in (name[:-1], name + "0", name[: at - 3] + "zz/" + name[at:], entry, "x", names.root + "a/b/c", other):
        assert not names.is_unit(wrong)
    for wrong in (entry[:-1], name, names.log, names.log + "z" * 16, names.pins + "0" * 16):
        assert names.parse_entry(wrong) is None


def test_a_walk_passes_over_the_units_of_other_namespaces() -> None:
    names = ObjectNames("p", bytes(range(32)), Keyring.public())
    keys = [BlockKey(bytes([tenant]) * 16 + bytes(32)) for tenant in range(20)]
    ours = sorted(names.unit(key) for key in keys)
    others = [ObjectNames("p", bytes([n]) * 32, Keyring.public()).unit(key) for n in range(9) for key in keys]
    listing, cursor, seen, pages = sorted([*ours, *others]), "", [], 0
    while page := [name for name in listing if name > cursor][:1]:
        seen += [name for name in page if names.is_unit(name)]
        cursor = names.behind(page[-1])
        pages += 1
    assert seen == ours and pages <= 3 * len(keys)


def test_all_that_a_tenant_stored_has_one_prefix_and_no_name_tells_its_content() -> None:
    keyring = Keyring([Key(bytes([1]) * 8, bytes([2]) * 32)], bytes([3]) * 32)
    names = ObjectNames("p", bytes(range(32)), keyring)
    scopes = [scope_of("a"), scope_of("a", b"adapter"), scope_of("a", isolated="class")]
    assert len({names.scope(scope) for scope in scopes}) == 3
    assert all(names.scope(scope).startswith(names.tenant(scopes[0])) for scope in scopes)
    assert names.tenant(scope_of("b")) != names.tenant(scopes[0])
    assert names.tenant(scope_of(None, b"adapter")) == names.tenant(SHARED)
    key = BlockKey(scopes[0] + bytes(range(32)))
    for keyed in (names, ObjectNames("p", bytes(range(32)), Keyring.public())):
        name = keyed.unit(key)
        assert all(part.hex()[:16] not in name for part in (names.namespace, key[:16], key[16:]))
    assert names.unit(key) != ObjectNames("p", bytes(range(32)), Keyring.public()).unit(key), (
        "and a guess needs the key"
    )


@pytest.mark.parametrize("count, rounds_max", [(1, 1), (6, 1), (7, 2), (32, 2), (198, 2), (418, 3), (4096, 3)])
def test_few_rounds_find_the_end_of_any_prefix(count: int, rounds_max: int) -> None:
    for there in {0, 1, min(2, count), count // 3, count // 2, count - 1, count}:
        low, high, rounds, probes = 0, count, 0, 0
        while low < high:
            points = strides.spread(low, high, strides.probe_width(rounds))
            assert points[0] == low, "the first unknown stride is asked for itself"
            low, high = strides.narrow(low, high, {point: point < there for point in points})
            rounds += 1
            probes += len(points)
        assert low == there and rounds <= rounds_max and probes <= 6 + 32 * (rounds_max - 1)
        assert there or probes <= 6, "a prompt that is unknown"


def test_a_hole_is_not_vouched_for_when_it_was_probed() -> None:
    assert strides.narrow(0, 4, {0: False, 1: True, 2: True, 3: True}) == (0, 0)
    assert strides.narrow(0, 4, {0: True, 1: True, 2: False, 3: True}) == (2, 2)


def test_runs_of_neighbours() -> None:
    assert strides.runs([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
    assert strides.runs([]) == []


def test_an_object_lives_only_while_each_of_its_blocks_may() -> None:
    long, short = Stamp(1000, 86400, None, Depth.G4), Stamp(1500, 300, 3600, Depth.G4)
    lives = [Lifetime(2000, (long,)), Lifetime(1900, (long, short)), Lifetime(1800, (short,))]
    life = Lifetime.common(lives)
    assert life.last_use == 1800
    for now in (1800, 2000, 2100, 2101, 2500, 5100, 6000):
        assert life.servable(Depth.G4, now) <= all(each.servable(Depth.G4, now) for each in lives)
    assert life.servable(Depth.G4, 2050), "and while all of them may, it does"


def test_a_ceiling_of_one_block_is_the_objects() -> None:
    deep, shallow = Stamp(0, None, None, Depth.G4), Stamp(0, None, None, Depth.G3)
    life = Lifetime.common([Lifetime(0, (deep,)), Lifetime(0, (shallow,))])
    assert life.servable(Depth.G3, 1) and not life.servable(Depth.G4, 1)


def test_a_tombstone_over_one_block_covers_its_object() -> None:
    old, new = Stamp(100, 500, None, Depth.G4), Stamp(900, 500, None, Depth.G4)
    assert Lifetime.common([Lifetime(900, (old,)), Lifetime(900, (new,))]).born == 100
    assert Lifetime(900, (old, new)).born == 900, "a block that was stored again after it is the new one"


def test_renewal_is_due_once_per_half_ttl() -> None:
    life = Lifetime(1000, (Stamp(0, 600, None, Depth.G4),))
    assert life.renewal_time(renewed=1000, wall_s=1299) == 1300
    assert life.renewal_time(renewed=1000, wall_s=1601) == math.inf, "what is dead is not revived"
    endless = Lifetime(0, (Stamp(0, None, None, Depth.G4),))
    assert endless.renewal_time(0, 1e9) == math.inf, "nothing to renew"
