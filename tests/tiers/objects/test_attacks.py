"""What somebody with the bucket, and without the keys, can do: the table in SECURITY.md names these tests.

`thief` knows the code, the formats and all that is public, and holds a keyring of its own. Nothing that it writes is
believed, and all of it is left as it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.keyring import Key, Keyring, KeyState
from kvtier.retention import pins as codec
from kvtier.retention.pins import Pin
from kvtier.retention.terms import Terms
from kvtier.testing import chain_of, payload_of, seal
from kvtier.tiers.objects import delta_format, purge_log
from kvtier.tiers.objects.bucket.protocol import RecordedUse
from kvtier.tiers.objects.frame import decode
from kvtier.tiers.objects.purge_log import LogBroken
from kvtier.tiers.objects.signed import Signer
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from tests.tiers.objects.support.virtual_bucket import NS, Replica, VirtualServer

pytest.importorskip("cryptography")

S = 4
DAY_S = 86400.0
OURS, OLD, THEIRS = (bytes([n]) * 8 for n in (1, 2, 9))
NAME_KEY = bytes([7]) * 32


def ring(*more: tuple[bytes, KeyState]) -> Keyring:
    keys = [Key(OURS, bytes([1]) * 32), *(Key(id, bytes(id[:1]) * 32, state) for id, state in more)]
    return Keyring(keys, NAME_KEY)


def forged_ring(id: bytes = OURS) -> Keyring:
    """A thief's: it even knows the name key, and calls its own secret by the id of ours."""
    return Keyring([Key(id, bytes([66]) * 32)], NAME_KEY)


def replica(server: VirtualServer, keyring: Keyring | None = None, **more: object) -> Replica:
    return Replica(server, keyring=keyring or ring(), **more)  # type: ignore[arg-type]


async def read(one: Replica, chain: Sequence[BlockKey], ranks: int = 1) -> list[Loaded | Miss]:
    buffers = [bytearray(NS.block_bytes) for _ in chain]
    step = NS.block_bytes // ranks
    pieces = [tuple(memoryview(b)[r * step : (r + 1) * step] for r in range(ranks)) for b in buffers]
    targets = [Target(index, some) for index, some in enumerate(pieces)]
    results = await one.store.read(chain, 0, None, targets)
    for key, buffer, index in zip(chain, buffers, range(len(chain)), strict=True):
        assert not isinstance(results[index], Loaded) or buffer == payload_of(key, NS.block_bytes), "forged bytes"
    return [results[index] for index in range(len(chain))]


async def payloads_read(one: Replica, chain: Sequence[BlockKey]) -> list[bytes | Miss]:
    """What a read of the whole unit gives, whatever bytes these are."""
    buffers = [bytearray(NS.block_bytes) for _ in chain]
    targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
    results = await one.store.read(chain, 0, None, targets)
    found = ((results[index], bytes(buffer)) for index, buffer in enumerate(buffers))
    return [payload if isinstance(result, Loaded) else result for result, payload in found]


def forge(
    thief: Replica, chain: Sequence[BlockKey], position: int = 0, max_age: float | None = None
) -> tuple[str, bytes]:
    """The bytes of a unit with chosen payload, whole in every way but for our key."""
    from dataclasses import replace

    from kvtier.checksum import digest_of
    from kvtier.tiers.objects.payload import make_unit

    terms = Terms("t", ttl=DAY_S, max_age=max_age)
    blocks = seal(list(chain), range(len(chain)), NS.block_bytes, thief.clock.wall(), terms, position=position)
    chosen = memoryview(b"\x66" * NS.block_bytes)
    blocks = [replace(block, pieces=(chosen,), digest=digest_of([chosen])) for block in blocks]
    _, data = make_unit(NS.digest, blocks, blocks[0].life, thief.store._keyring)
    return thief.store.names.unit(chain[-1]), bytes(data)


@pytest.mark.parametrize("keyring", [Keyring.public(), forged_ring(THEIRS), forged_ring(OURS)])
async def test_put_units_forged_bytes_are_a_miss_and_left_alone(keyring: Keyring) -> None:
    server = VirtualServer()
    one, thief = replica(server), replica(server, keyring)
    chain = chain_of(NS, S)
    _, data = forge(thief, chain)
    name = one.store.names.unit(chain[-1])
    server.put(name, data)
    why = Miss.FORGED if keyring.active.id == OURS else Miss.UNKNOWN_KEY
    assert await read(one, chain) == [why] * S
    assert await one.store.probe(chain, 0) is None
    sealed = seal(list(chain), range(S), NS.block_bytes, one.clock.wall())
    assert await one.writer.write(sealed) is Stored.REFUSED
    server.clock.advance(400 * DAY_S)
    await one.walk()
    assert server.objects[name].data == data, "never overwritten, never swept"


async def test_put_units_a_block_swapped_under_an_authentic_header_is_never_served() -> None:
    server = VirtualServer()
    one = replica(server)
    chain, other = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    await one.write(chain)
    await one.write(other)
    name, donor = (one.store.names.unit(each[-1]) for each in (chain, other))
    header, whole = 4096, server.objects[name].data
    for ranks in (1, 4):
        raw = bytearray(whole)
        raw[header : header + NS.block_bytes] = server.objects[donor].data[header : header + NS.block_bytes]
        server.put(name, raw)
        fresh = replica(server, seed=3)
        assert not isinstance((await read(fresh, chain, ranks))[0], Loaded)


async def test_put_units_no_flipped_bit_is_served_and_no_header_without_a_tag_condemned() -> None:
    server, rng = VirtualServer(), random.Random(1)
    one = replica(server)
    chain = chain_of(NS, S)
    await one.write(chain)
    name = one.store.names.unit(chain[-1])
    whole = server.objects[name].data
    for offset in [*range(0, 4096, 97), *(rng.randrange(4096, len(whole)) for _ in range(40))]:
        raw = bytearray(whole)
        raw[offset] ^= 1 << rng.randrange(8)
        server.put(name, raw)
        results = await read(replica(server, seed=2), chain)
        assert not all(isinstance(each, Loaded) for each in results)
        if offset < 4096:
            assert server.objects[name].data == raw, "damage cannot be told from forgery: left alone"
        else:
            assert name not in server.objects, "an authentic header over damaged bytes: condemned"


async def test_put_units_a_header_cannot_be_given_another_life_or_position() -> None:
    server = VirtualServer()
    one = replica(server)
    chain = chain_of(NS, S, scope=scope_of("a"))
    await one.write(chain, ttl=300)
    name = one.store.names.unit(chain[-1])
    whole = server.objects[name].data
    await one.store.purges.append(scope_of("a"))
    for start, size in ((80, 77), (168, 8)):  # lifetime, position
        raw = bytearray(whole)
        raw[start : start + size] = bytes(b ^ 0x11 for b in raw[start : start + size])
        server.put(name, raw)
        assert await one.store.probe(chain, 0) is None


async def test_put_used_a_forged_time_of_use_keeps_nothing_alive() -> None:
    server = VirtualServer()
    one = replica(server)
    chain, other = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    for each in (chain, other):
        await one.write(each, ttl=300)
    name, donor = (one.store.names.unit(each[-1]) for each in (chain, other))
    server.clock.advance(200)
    entry = await one.store.probe(other, 0)
    assert entry is not None
    await one.store.renewer.renew(entry, one.clock.wall())
    proof = getattr(server.objects[donor].used, "proof", "")
    assert proof, "a use is recorded with its proof"
    server.clock.advance(200)
    now = server.clock.wall()
    for used in (
        RecordedUse(now),
        RecordedUse(now, "00" * 24),
        RecordedUse(now, "zz"),
        RecordedUse(server.objects[donor].used, proof),
        RecordedUse(now, proof),
    ):
        server.objects[name].used = used  # type: ignore[assignment]
        fresh = await replica(server, seed=2).store.probe(chain, 0)
        assert fresh is not None and one.store.miss_of(fresh, now) is Miss.EXPIRED
    renewed = await replica(server, seed=2).store.probe(other, 0)
    assert renewed is not None and one.store.miss_of(renewed, now) is None, "the control: a replica's own is believed"


@pytest.mark.parametrize("keyring", [Keyring.public(), forged_ring(THEIRS), forged_ring(OURS)])
async def test_put_log_a_forged_purge_is_not_believed_and_stops_what_it_could_hide(keyring: Keyring) -> None:
    server = VirtualServer()
    one, thief = replica(server), replica(server, keyring)
    chain = chain_of(NS, S, scope=scope_of("a"))
    await one.write(chain)
    await one.store.purges.append(scope_of("b"))
    number = 2
    body = purge_log.encode(number, bytes(16), 0, {scope_of("a"): number})
    name = one.store.names.entry(number)
    server.put(name, Signer(thief.store._keyring, "p/").sign(name, body))
    with pytest.raises(LogBroken, match="entry 2"):
        await one.store.refresh()
    assert not one.store.purges.covers(scope_of("a"), 0), "no forged purge is believed"
    with pytest.raises(TierError):
        await one.store.purges.append(scope_of("a"))  # said, not lost
    assert one.store.purges.faults == 1


async def test_put_log_an_authentic_purge_cannot_be_moved_or_copied() -> None:
    server = VirtualServer()
    one = replica(server)
    for tenant in "ab":
        await one.store.purges.append(scope_of(tenant))
    first = server.objects[one.store.names.entry(1)].data
    server.put(one.store.names.entry(3), first)
    with pytest.raises(LogBroken, match="entry 3"):
        await one.store.refresh()


@pytest.mark.parametrize("keyring", [Keyring.public(), forged_ring(OURS)])
async def test_put_pins_a_forged_pin_keeps_nothing(keyring: Keyring) -> None:
    server = VirtualServer()
    one, thief = replica(server), replica(server, keyring)
    chain = chain_of(NS, S)
    await one.write(chain, ttl=60)
    now = server.clock.wall()
    pin = Pin("p", tuple(chain), now, now + 1e6)
    name = one.store.names.pin("p")
    for raw in (thief.store.pins._signer.sign(name, codec.encode([pin])), codec.encode([pin]), b"", b"x" * 4096):
        server.put(name, raw)
        server.clock.advance(100)
        fresh = replica(server, seed=2)
        await fresh.store.refresh()
        await fresh.store.pins.settle()
        assert fresh.store.pins.list() == []
        entry = await fresh.store.probe(chain, 0)
        assert entry is None or fresh.store.miss_of(entry, server.clock.wall()) is Miss.EXPIRED


async def test_put_pins_a_pin_under_another_name_does_not_count() -> None:
    server = VirtualServer()
    one = replica(server)
    chain = chain_of(NS, S)
    now = server.clock.wall()
    await one.store.pins.put(Pin("mine", tuple(chain), now, now + 1e6))
    server.put(one.store.names.pin("other"), server.objects[one.store.names.pin("mine")].data)
    fresh = replica(server, seed=2)
    await fresh.store.refresh()
    await fresh.store.pins.settle()
    assert [pin.name for pin in fresh.store.pins.list()] == ["mine"]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("keyring", [Keyring.public(), forged_ring(OURS)])
async def test_put_deltas_forged_ones_teach_nothing(merged: bool, keyring: Keyring) -> None:
    server = VirtualServer()
    one, two, thief = replica(server), replica(server, seed=1), replica(server, keyring, seed=2)
    chain = chain_of(NS, S)
    await one.write(chain)
    entry = one.store.index.get(chain[-1])
    assert entry is not None
    stolen = delta_format.encode([entry.hint])
    names = one.store.names
    name = f"{names.merged}0/{int(server.clock.wall() // 30) - 2:010x}-" if merged else f"{names.deltas}{1:016x}-ab"
    name = name if merged else f"{names.deltas}{int(server.clock.wall() * 1e6):016x}-00000000"
    server.put(name, thief.store.deltas._signer.sign(name, stolen))
    server.clock.advance(60)
    await two.turn()
    assert two.store.deltas.received == 0 and two.store.index.totals() == (0, 0)


async def test_put_deltas_a_replayed_one_is_a_hint_that_a_read_decides() -> None:
    server = VirtualServer()
    one, two = replica(server), replica(server, seed=1)
    chain = chain_of(NS, S)
    await one.write(chain)
    await one.store.deltas.publish()
    await one.store.bucket.delete(one.store.names.unit(chain[-1]))
    server.clock.advance(20)
    await two.turn()
    hint = two.store.index.find_hint(chain[0], chain[-1], S - 1)
    assert hint is not None and two.store.deltas.received == 1
    buffers = [bytearray(NS.block_bytes) for _ in chain]
    targets = [Target(index, (memoryview(b),)) for index, b in enumerate(buffers)]
    assert set((await two.store.read(chain, 0, None, targets)).values()) == {Miss.ABSENT}
    assert two.store.index.totals() == (0, 0)


async def test_list_names_tell_nothing_that_could_be_guessed() -> None:
    server = VirtualServer()
    one = replica(server)
    scope = scope_of("tenant", b"adapter", secret=b"x" * 16)
    chain = chain_of(NS, S, scope=scope)
    await one.write(chain)
    now = one.clock.wall()
    await one.store.pins.put(Pin("system-prompt", tuple(chain), now, now + 100))
    await one.store.purges.append(scope_of("other"))
    public = Replica(server, seed=1)  # somebody who lists, knows the formats and guesses the prompt
    guesses = [NS.digest, scope, *chain, *(key[16:] for key in chain), b"system-prompt", scope_of("other")]
    for name in server.names:
        assert not any(guess.hex()[:16] in name for guess in guesses)
    assert public.store.names.unit(chain[-1]) not in server.names
    assert public.store.names.pin("system-prompt") not in server.names


async def test_get_no_token_and_no_secret_is_in_what_is_stored() -> None:
    server = VirtualServer()
    one = replica(server)
    await one.write(chain_of(NS, S, scope=scope_of("tenant")))
    await one.store.purges.append(scope_of("tenant"))
    stored = b"".join(each.data for each in server.objects.values())
    for secret in (bytes([1]) * 32, NAME_KEY, b"tenant"):
        assert secret not in stored


async def test_delete_is_denial_and_no_more() -> None:
    server = VirtualServer()
    one = replica(server)
    chain = chain_of(NS, S)
    await one.write(chain)
    for name in list(server.names):
        server.drop(name)
    assert await read(one, chain) == [Miss.ABSENT] * S
    await one.write(chain)
    assert all(isinstance(each, Loaded) for each in await read(one, chain))


async def test_delete_of_a_purge_is_noticed_by_whoever_read_it() -> None:
    server = VirtualServer()
    one = replica(server)
    await one.store.purges.append(scope_of("a"))
    server.drop(one.store.names.entry(1))
    with pytest.raises(LogBroken):
        await one.store.refresh()
    assert one.store.purges.covers(scope_of("a"), 0), "and it stays in force"


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S])
async def test_clock_two_days_off_purges_and_keeps_nothing_of_others(ahead_s: float) -> None:
    server = VirtualServer()
    right, wrong = replica(server), replica(server, seed=1, ahead_s=ahead_s)
    mine, gone = chain_of(NS, S, scope=scope_of("a")), chain_of(NS, S, scope=scope_of("b"))
    for each in (mine, gone):
        await right.write(each, ttl=DAY_S)
    await wrong.store.refresh()
    await wrong.store.purges.append(scope_of("b"))
    await wrong.walk()
    await right.store.refresh()
    entry = await right.store.probe(mine, 0)
    assert entry is not None and right.store.miss_of(entry, right.clock.wall()) is None
    entry = await right.store.probe(gone, 0)
    assert entry is None or right.store.miss_of(entry, right.clock.wall()) is Miss.PURGED


async def test_replay_of_a_purged_unit_stays_purged() -> None:
    server = VirtualServer()
    one = replica(server)
    chain = chain_of(NS, S, scope=scope_of("a"))
    await one.write(chain)
    name = one.store.names.unit(chain[-1])
    old = server.objects[name].data
    await one.store.purges.append(scope_of("a"))
    await one.write(chain)
    new = await one.store.probe(chain, 0)
    assert new is not None and one.store.miss_of(new, one.clock.wall()) is None
    server.put(name, old)
    for reader in (one, replica(server, seed=1)):
        await reader.store.refresh()
        entry = await reader.store.probe(chain, 0)
        assert entry is not None and reader.store.miss_of(entry, reader.clock.wall()) is Miss.PURGED


@pytest.mark.parametrize("keyring", [ring(), Keyring.public()], ids=["keys", "public"])
async def test_replay_of_an_older_version_is_one_result_whole_and_for_its_own_life(keyring: Keyring) -> None:
    """The older version of a name is a result of the same computation: all of it or nothing, and no longer than it
    was to live. The versions have other bytes here, to tell them apart."""
    server = VirtualServer()
    writer, knows = replica(server, keyring), replica(server, keyring, seed=1)
    chain = chain_of(NS, S)
    name, first = forge(writer, chain, max_age=3600.0)
    header = len(first) - S * NS.block_bytes
    await writer.write(chain, max_age=7200.0)
    second = server.objects[name].data
    assert await knows.store.probe(chain, 0) is not None  # the second, as is in its index from now on
    server.put(name, first[:header] + second[header:])
    assert not any(isinstance(each, Loaded) for each in await read(replica(server, keyring), chain)), "a mixture"
    server.put(name, first)
    for reader in (knows, replica(server, keyring, seed=2)):
        assert await payloads_read(reader, chain) == [b"\x66" * NS.block_bytes] * S
    server.clock.advance(3601)
    server.put(name, first, used=server.clock.wall())
    for reader in (knows, replica(server, keyring, seed=3)):
        await reader.store.refresh()
        assert await payloads_read(reader, chain) == [Miss.EXPIRED] * S, "the later version had an hour more"


async def test_rollback_of_the_whole_bucket_is_noticed_by_whoever_has_a_memory() -> None:
    server = VirtualServer()
    one = replica(server)
    chain = chain_of(NS, S, scope=scope_of("a"))
    await one.write(chain)
    await one.store.purges.append(scope_of("b"))
    snapshot = {name: each.data for name, each in server.objects.items()}
    await one.store.purges.append(scope_of("a"))
    memory = one.store.purges.memory()
    for name in list(server.names):
        server.drop(name)
    for name, data in snapshot.items():
        server.put(name, data)
    with pytest.raises(LogBroken):
        await one.store.refresh()
    restarted = replica(server, seed=1)
    restarted.store.purges.remember(memory)
    with pytest.raises(LogBroken):
        await restarted.store.refresh()


async def test_rotation_keeps_what_accepted_keys_wrote_and_misses_what_retired_ones_did() -> None:
    server = VirtualServer()
    chain = chain_of(NS, S)
    await replica(server, Keyring([Key(OLD, bytes(OLD[:1]) * 32)], NAME_KEY)).write(chain)
    accepting = replica(server, ring((OLD, KeyState.ACCEPT)), seed=1)
    assert all(isinstance(each, Loaded) for each in await read(accepting, chain))
    for keys in (ring((OLD, KeyState.RETIRED)), ring()):
        one = replica(server, keys, seed=2)
        assert await read(one, chain) == [Miss.UNKNOWN_KEY] * S
    name = accepting.store.names.unit(chain[-1])
    assert decode(server.objects[name].data, accepting.store._keyring).key_id == OLD
    entry = await accepting.store.probe(chain, 0)
    assert entry is not None
    sealed = seal(list(chain), range(S), NS.block_bytes, server.clock.wall(), Terms("long", ttl=1e6))
    assert await accepting.writer.write(sealed) is Stored.PRESENT
    assert decode(server.objects[name].data, accepting.store._keyring).key_id == OURS, "rewritten by the active key"


async def test_no_key_the_same_swap_of_bytes_and_digests_is_served() -> None:
    """The control: local trust is what it says."""
    server = VirtualServer()
    one, thief = Replica(server), Replica(server, seed=1)
    chain = chain_of(NS, S)
    name, data = forge(thief, chain)
    server.put(name, data)
    with pytest.raises(AssertionError, match="forged bytes"):
        await read(one, chain)
