"""Hints of units: small, found by any block that a unit holds, and no more than hints."""

from __future__ import annotations

import asyncio
import random
import sys
import time
import tracemalloc
from typing import Any

import pytest

from kvtier.errors import CorruptError
from kvtier.identity.keys import SHARED, BlockKey, Scope, scope_of
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import Lifetime, Stamp
from kvtier.retention.pins import Pin
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.objects import delta_format, hints
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.objects.hints import UnitHint, UnitHints, prints_of
from kvtier.tiers.objects.index import ObjectEntry, ObjectIndex
from kvtier.tiers.objects.signed import Signer
from kvtier.tiers.protocol import Loaded, Miss, Stored
from tests.tiers.objects.support.old_delta import encode_old
from tests.tiers.objects.support.replicas import NS, S, Site
from tests.tiers.objects.support.virtual_bucket import Replica, VirtualServer

NOW = 1_800_000_000.0
LIFE = Lifetime.of(Terms("t", ttl=60), NOW)  # type: ignore[arg-type]
PUBLIC = Keyring.public()


def hint_of(hashes: list[bytes], depth: int = 0, scope: Scope = SHARED, life: Lifetime = LIFE) -> UnitHint:
    return UnitHint(scope, depth, hashes[-1], prints_of(hashes), life, 3, len(hashes) << 20)


def random_hint(rng: random.Random, blocks: int = 16) -> UnitHint:
    return hint_of([rng.randbytes(32) for _ in range(blocks)], scope=Scope(rng.randbytes(16)))


def table(stride: int = 16, most: int = 1 << 20) -> UnitHints:
    return UnitHints(stride, hash, most)


def keys_of(hashes: list[bytes], scope: bytes = bytes(16)) -> list[BlockKey]:
    return [BlockKey(scope + each) for each in hashes]


def test_a_unit_is_found_by_any_of_its_blocks_and_by_its_name() -> None:
    known, rng = table(), random.Random(1)
    hashes = [rng.randbytes(32) for _ in range(20)]
    keys = keys_of(hashes)
    short, long = hint_of(hashes[:3]), hint_of(hashes[:16])
    known.put(short)
    known.put(long)
    for depth in range(16):
        assert known.find(keys[0], keys[depth], depth) == long
    other = keys_of([rng.randbytes(32) for _ in range(16)])
    assert known.find(keys[0], other[3], 3) is None and known.find(other[0], keys[3], 3) is None
    assert known.find(keys[0], keys[16], 16) is None and known.find(keys[0], keys[3], 4) is None
    assert known.find(BlockKey(bytes([1] * 16) + hashes[0]), keys[0], 0) is None
    known.drop(keys[15])
    assert known.find(keys[0], keys[2], 2) == short and known.find(keys[0], keys[3], 3) is None
    assert known.named(hash(keys[2])) == short
    known.check(16)
    known.clear()
    assert known.find(keys[0], keys[2], 2) is None and known.count == 0


def test_any_order_of_puts_and_drops_leaves_it_whole() -> None:
    rng = random.Random(2)
    known, model = table(4, 64), {}
    heads = [rng.randbytes(32) for _ in range(5)]
    for _ in range(1000):
        hashes = [rng.choice(heads), *(rng.choice(heads) for _ in range(rng.randrange(4)))]
        hashes[-1] = bytes([rng.randrange(30)]) + hashes[-1][1:]
        hint = hint_of(hashes)
        if rng.random() < 0.6:
            known.put(hint)
            model[hint.last] = hint
        else:
            known.drop(hint.last)
            model.pop(hint.last, None)
        assert known.count <= 64
    known.check(4)
    for last in model:
        found = known.named(hash(last))
        assert found is None or found == model[last]


def test_past_its_bound_what_was_found_lately_stays() -> None:
    known, rng = table(4, 100), random.Random(3)
    wanted = [rng.randbytes(32) for _ in range(4)]
    known.put(hint_of(wanted))
    keys = keys_of(wanted)
    for _ in range(1000):
        known.put(random_hint(rng, 4))
        assert known.find(keys[0], keys[-1], 3) is not None
    assert known.count == 100
    known.check(4)


@pytest.mark.parametrize("kind", ["hints", "entries"])
def test_a_first_block_that_all_units_share_costs_no_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt begins with the same system prompt: any verb goes through a bounded number of its units."""
    rng, index = random.Random(11), ObjectIndex(4, hash, hints_max=3000)
    head, looked = rng.randbytes(32), 0

    def counted(real: Any) -> Any:
        def call(*given: Any) -> Any:
            nonlocal looked
            looked += 1
            return real(*given)

        return call

    monkeypatch.setattr(UnitHints, "_read", counted(UnitHints._read))
    monkeypatch.setattr(ObjectEntry, "holds", counted(ObjectEntry.holds))
    chains = [keys_of([head, *(rng.randbytes(32) for _ in range(3))]) for _ in range(3500)]
    for number, chain in enumerate(chains):
        looked = 0
        if kind == "hints":
            index.learn(hint_of([key[16:] for key in chain]))
        else:
            index.put(entries_of(chain)[0])
        assert looked <= 80, f"the unit {number}"
    for chain in (chains[600], chains[3000], chains[-1]):
        looked = 0
        known = index.find(chain[0], chain[3], 3) or index.find_hint(chain[0], chain[3], 3)
        assert known is not None and known.last == chain[3] and looked <= 2 * hints.WALK_MAX + 8
        looked = 0
        index.drop(chain[3])
        assert looked <= 8
    index.check()


def test_the_stamp_that_ends_last_is_kept() -> None:
    terms = [(60, None, Depth.G4), (6000, 9000, Depth.G4), (None, None, Depth.G2)]
    life = Lifetime(NOW, tuple(Stamp(NOW, *each) for each in terms))  # type: ignore[arg-type]
    known = table(4)
    hashes = [bytes([n]) * 32 for n in range(4)]
    known.put(hint_of(hashes, life=life))
    keys = keys_of(hashes)
    found = known.find(keys[0], keys[1], 1)
    assert found is not None and found.life == Lifetime(NOW, (life.stamps[1],))  # type: ignore[arg-type]
    known.put(hint_of(hashes, life=Lifetime(NOW, (life.stamps[2],))))  # type: ignore[arg-type]
    found = known.find(keys[0], keys[1], 1)
    assert found is not None and not found.life.servable(Depth.G4, NOW)  # type: ignore[arg-type]


def test_a_unit_of_sixteen_blocks_takes_600_bytes_of_memory_and_128_of_a_delta() -> None:
    rng, count = random.Random(4), 4096
    index = ObjectIndex(16, hash)
    some = [random_hint(rng) for _ in range(count)]
    tracemalloc.start()
    for hint in some:
        assert index.learn(hint)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"{size / count:.0f} bytes of memory")
    assert size / count <= 600
    assert index.totals() == (16 * count, count * 16 << 20)
    one_tenant = [hint._replace(scope=some[0].scope) for hint in some[:1000]]
    raw = delta_format.encode(one_tenant)
    print(f"{len(raw) / 1000:.1f} bytes of a delta")
    assert len(raw) <= 128 * 1000
    assert list(delta_format.parse(raw, NS.digest, PUBLIC)) == one_tenant


def test_memory_is_bounded_whatever_the_stride() -> None:
    for stride in (1, 16, 256, 1024):
        known = table(stride)
        assert known._most * (known._width + 200) <= hints.BYTES_MAX and known._most >= 1000
    assert table(16)._most == hints.HINTS_MAX and table(1024)._most < 100_000
    rng, wide = random.Random(10), table(1024)
    some = [random_hint(rng, 1024) for _ in range(300)]
    for hint in some:
        wide.put(hint)
    assert all(wide.named(hash(hint.last)) == hint for hint in some)
    wide.check(1024)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_units_take_600_bytes_each_and_no_step_takes_long() -> None:
    rng, count = random.Random(5), 1 << 20
    index = ObjectIndex(16, hash)
    tracemalloc.start()
    slowest = 0.0
    for number in range(count):
        hint = random_hint(rng)
        began = time.thread_time()
        index.learn(hint)
        slowest = max(slowest, time.thread_time() - began) if number else 0.0
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"{size / count:.0f} bytes of memory; the slowest step {slowest * 1e3:.1f} ms")
    assert size / count <= 600


def entries_of(chain: list[BlockKey]) -> list[ObjectEntry]:
    hashes = tuple(key[16:] for key in chain)
    frame = Frame(NS.digest, scope_of(None), 0, 4096, hashes, (bytes(16),) * len(hashes), LIFE, 9)
    return [ObjectEntry(frame, frame.total_bytes, '"etag"', LIFE, LIFE.last_use, float("-inf"))]  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [2, 3])
def test_deltas_survive_the_way_and_nothing_else_does(version: int) -> None:
    entries = entries_of(list(chain_of(NS, S))) * 2
    known = [entry.hint for entry in entries]
    raw = encode_old(entries, PUBLIC) if version == 2 else delta_format.encode(known)
    assert list(delta_format.parse(raw, NS.digest, PUBLIC)) == known
    signer, rng = Signer(PUBLIC, "p/"), random.Random(3)
    signed = signer.sign("p/ctl/delta/1", raw)
    assert list(delta_format.parse(signer.open("p/ctl/delta/1", signed), NS.digest, PUBLIC)) == known
    for _ in range(300):
        damaged = bytearray(signed)
        damaged[rng.randrange(len(signed))] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptError):
            signer.open("p/ctl/delta/1", damaged)
    for length in range(0, len(raw), 7):
        with pytest.raises(CorruptError):
            list(delta_format.parse(raw[:length], NS.digest, PUBLIC))
    for length in (0, 10, 16, 32, len(raw) - 1):
        with pytest.raises(CorruptError):
            signer.open("p/ctl/delta/1", signed[:length])
    with pytest.raises(CorruptError):
        signer.open("p/ctl/delta/2", signed)


def test_any_bytes_are_an_error_or_units() -> None:
    rng, raw = random.Random(6), delta_format.encode([random_hint(random.Random(7), n + 1) for n in range(8)])
    for _ in range(400):
        forged = bytearray(raw)
        for _ in range(rng.randrange(1, 8)):
            forged[rng.randrange(8, len(forged))] = rng.randrange(256)
        try:
            found = list(delta_format.parse(forged[: rng.randrange(len(forged) + 1)] or forged, NS.digest, PUBLIC))
        except CorruptError:
            continue
        assert len(found) <= 8 and all(1 <= hint.blocks <= 1024 and 0 <= hint.life.last_use < 2**40 for hint in found)


def joined(bodies: list[bytes]) -> bytearray:
    steps = delta_format.join(bodies, NS.digest, PUBLIC)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_a_frame_of_impossible_size_stops_no_merge() -> None:
    """Anybody may write a delta where there is no keyring; what is behind it must still be merged."""
    rng = random.Random(12)
    hashes = tuple(rng.randbytes(32) for _ in range(1024))
    huge = Frame(NS.digest, SHARED, 0, 1 << 32, hashes, (bytes(16),) * 1024, LIFE)
    entry = ObjectEntry(huge, huge.total_bytes, "", LIFE, LIFE.last_use, float("-inf"))  # type: ignore[arg-type]
    other = random_hint(rng)
    bodies = [bytes(encode_old([entry], PUBLIC)), bytes(delta_format.encode([other]))]
    assert list(delta_format.parse(joined(bodies), NS.digest, PUBLIC))[1:] == [other]


def test_a_merge_holds_no_more_units_than_a_delta_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_format, "UNITS_MAX", 100)
    rng = random.Random(13)
    units = [random_hint(rng, 1) for _ in range(1000)]
    again = units[895]  # told once more at the end: it stays
    bodies = [bytes(delta_format.encode(units[start : start + 100])) for start in range(0, 1000, 100)]
    bodies.append(bytes(delta_format.encode([again])))
    steps, most = delta_format.join(bodies, NS.digest, PUBLIC), 0
    for _ in steps:
        most = max(most, len(steps.gi_frame.f_locals["units"]))
    assert most == 100
    assert list(delta_format.parse(joined(bodies), NS.digest, PUBLIC)) == [*units[901:], again]


async def test_a_merge_leaves_the_loop_to_lookups() -> None:
    store = Replica(VirtualServer()).store
    rng = random.Random(14)
    bodies = [bytes(delta_format.encode([random_hint(rng) for _ in range(300)])) for _ in range(4)]
    turns, merging = 0, asyncio.ensure_future(store.deltas._join(bodies))
    while not merging.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 2 * 1200 // 32 and len(list(delta_format.parse(merging.result(), NS.digest, PUBLIC))) == 1200


def test_merged_deltas_of_both_versions_have_each_unit_once() -> None:
    chain = list(chain_of(NS, S))
    entries, other = entries_of(chain), random_hint(random.Random(8))
    newer = entries[0].hint._replace(life=Lifetime(NOW + 5, LIFE.stamps))  # type: ignore[arg-type]
    bodies = [bytes(encode_old(entries, PUBLIC)), b"junk", bytes(delta_format.encode([other, newer]))]
    merged = joined(bodies)
    assert list(delta_format.parse(merged, NS.digest, PUBLIC)) == [newer, other]


def told(one: Replica, two: Replica) -> list[UnitHint]:
    """What `one` wrote, as `two` learns it from a delta."""
    known = list(one.store.deltas._pending)
    for hint in known:
        assert two.store.index.learn(hint)
    return known


@pytest.mark.parametrize("shared", [1, 3, S])
async def test_blocks_of_a_unit_that_goes_on_elsewhere_are_read(site: Site, shared: int) -> None:
    """The reader's chain has only the first blocks of the unit in common: the header names the rest."""
    one, two = await site.replica(), await site.replica()
    whole, other = chain_of(NS, 2 * S, seed=1), chain_of(NS, 2 * S, seed=2)
    await site.store(one, whole)
    for hint in one._store.deltas._pending:
        two._store.index.learn(hint)
    mixed = [*whole[:shared], *other[shared:]]
    assert two.peek(mixed, range(shared)) == [None] * shared
    found = await site.read(two, mixed, range(shared))
    assert [type(each) for each in found] == [Loaded] * shared
    assert two.peek(mixed, [shared]) == [Miss.ABSENT]


@pytest.mark.parametrize("shared", [1, 2, S])
async def test_blocks_of_a_chain_with_the_same_prints_are_never_served(site: Site, shared: int) -> None:
    """Four bytes of a hash meet again by chance, once in some thousand lookups beside a million units."""
    one, two = await site.replica(), await site.replica()
    stored = chain_of(NS, S, seed=1)
    ours = chain_of(NS, S, seed=2)
    mixed = [BlockKey(a[:20] + b[20:]) for a, b in zip(stored[:shared], ours[:shared], strict=True)]
    await site.store(one, stored)
    for hint in one._store.deltas._pending:
        two._store.index.learn(hint)
    for chain in (mixed, [*mixed, *ours[shared:]]):
        for _ in range(2):
            seeming = min(shared, S - 1)  # the last hash is known in full
            found = await site.read(two, chain, range(seeming))
            assert not any(isinstance(each, Loaded) for each in found)
            assert two.peek(chain, range(shared)) == [Miss.ABSENT] * shared, "its header tells"
    assert await site.store(two, [*mixed, *ours[shared:]]) == [Stored.STORED] * S
    assert [type(each) for each in await site.read(two, [*mixed, *ours[shared:]])] == [Loaded] * S
    assert [type(each) for each in await site.read(two, stored)] == [Loaded] * S


async def test_a_unit_with_the_same_prints_is_not_taken_for_what_is_to_be_written(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    stored = chain_of(NS, S, seed=1)
    ours = [BlockKey(a[:20] + b[20:]) for a, b in zip(stored, chain_of(NS, S, seed=2), strict=True)][: S - 1]
    await site.store(one, stored)
    for hint in one._store.deltas._pending:
        two._store.index.learn(hint)
    assert await site.store(two, ours) == [Stored.STORED] * (S - 1)
    three = await site.replica()
    assert [type(each) for each in await site.read(three, ours)] == [Loaded] * (S - 1)


async def test_a_forged_hint_that_ends_elsewhere_hides_a_unit_once(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    assert await site.store(one, chain[: S - 1]) == [Stored.STORED] * (S - 1)
    hashes = [key[16:] for key in chain]
    lie = hint_of([*hashes[: S - 1], hashes[S - 2]], scope=Scope(chain[0][:16]))
    two._store.index.learn(lie._replace(life=Lifetime.of(Terms("t", ttl=60), site.clock.wall()), position=0))
    await site.read(two, chain, range(S - 2))
    found = await site.read(two, chain, range(S - 2))
    assert [type(each) for each in found] == [Loaded] * (S - 2)


async def test_a_hint_of_what_is_gone_or_another_is_dropped(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    rng = random.Random(9)
    lies = [hint_of([*(key[16:] for key in chain[: S - 1]), rng.randbytes(32)], scope=Scope(chain[0][:16]))]
    lies.append(hint_of([key[16:] for key in chain], scope=Scope(chain[0][:16])))
    for hint in lies:
        two._store.index.learn(hint._replace(life=Lifetime.of(Terms("t", ttl=60), site.clock.wall()), position=0))
    assert two.peek(chain, range(S)) == [None] * S
    assert await site.read(two, chain) == [Miss.EVICTED] * S
    assert await site.read(two, chain, range(S - 1)) == [Miss.ABSENT] * (S - 1)
    assert two._store.index.totals() == (0, 0)
    assert await site.store(one, chain) == [Stored.STORED] * S
    site.clock.advance(10)
    assert [type(each) for each in await site.read(two, chain)] == [Loaded] * S


async def test_a_writer_uploads_nothing_that_it_has_a_hint_of() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    await one.write(chain)
    told(one, two)
    two.bucket.requests.clear()
    await two.write(chain)
    assert two.bucket.requests["put"] == 0 and two.bucket.requests["get"] == 1


async def test_what_another_replica_wrote_after_a_purge_is_not_deleted_by_the_next_one() -> None:
    server = VirtualServer()
    one, two = Replica(server), Replica(server, seed=1)
    chain, scope = chain_of(NS, S), scope_of(None)
    await one.store.purges.append(scope)
    await one.write(chain)
    told(one, two)
    await two.store.refresh()
    from kvtier.tiers.objects.delete import Remover

    assert Remover(two.store)._is_newer(two.store.names.unit(chain[-1]))


def test_many_pins_cost_an_expired_hint_no_search() -> None:
    """A lookup asks whether a pin covers it: by the hint's blocks, not by the pins."""
    pins, rng = Replica(VirtualServer()).store.pins, random.Random(15)
    ends = [keys_of([rng.randbytes(32) for _ in range(2)]) for _ in range(1000)]
    for number, chain in enumerate(ends):
        pins._cover(str(number), Pin(str(number), tuple(chain), NOW, NOW + 60))  # type: ignore[arg-type]
    inner = hint_of([ends[500][-1][16:], rng.randbytes(32)])
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        covered = pins.cover(inner, NOW), pins.cover(inner, NOW + 61), pins.cover(random_hint(rng), NOW)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert covered == (True, False, False) and calls < 400


def test_a_pin_on_an_inner_block_covers_a_hint() -> None:
    hashes = [bytes([n]) * 32 for n in range(4)]
    hint = hint_of(hashes)
    assert all(hint.may_hold(key) for key in keys_of(hashes))
    assert not hint.may_hold(keys_of([b"x" * 32])[0]) and not hint.may_hold(keys_of(hashes, b"y" * 16)[0])
    assert hints.print_of(keys_of(hashes)[1]) == hashes[1][:4]
    assert sample_namespace(4096).digest == NS.digest
