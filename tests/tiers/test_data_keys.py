"""Tenants' data keys: one per tenant, wrapped, remembered for a while, gone when destroyed."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from kvtier.encryption import DataKey
from kvtier.errors import ConfigError, CorruptError, KeyUnavailable, TierError
from kvtier.identity.keys import SHARED, Scope, scope_of
from kvtier.keyring import Key, Keyring, KeyState
from kvtier.testing import VirtualClock
from kvtier.tiers import key_directory
from kvtier.tiers.data_keys import (
    ABSENT_S,
    ASKING_MAX,
    KEY_CACHE_S,
    RECENT_S,
    StoredKeys,
    WrappedKey,
    load,
    obtain,
    wrapping_key_of,
)
from kvtier.tiers.key_directory import KeyDirectory
from kvtier.tiers.protocol import Miss
from tests.support.waiting import until
from tests.tiers.disk.support.keys import MemoryKeys, sample_keyring

TENANT = scope_of("tenant")


def stored(folder: Path, clock: VirtualClock | None = None, keyring: Keyring | None = None) -> StoredKeys:
    return StoredKeys(KeyDirectory(folder), keyring or sample_keyring(), clock or VirtualClock())


def test_all_replicas_get_the_same_key_and_each_tenant_its_own(tmp_path: Path) -> None:
    """Whoever comes first makes it."""
    replicas = [stored(tmp_path / "keys") for _ in range(8)]
    assert replicas[0].find(TENANT) is Miss.NO_KEY
    gate = threading.Barrier(8)

    def obtain(replica: StoredKeys) -> bytes:
        gate.wait()
        return replica.obtain(TENANT).secret

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(obtain, replicas))) == 1
    assert replicas[0].obtain(SHARED).secret != replicas[0].obtain(TENANT).secret
    files = list((tmp_path / "keys").glob("*.key"))
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    secret = replicas[0].obtain(TENANT).secret
    found = stored(tmp_path / "keys").find(TENANT)
    assert isinstance(found, DataKey) and found.secret == secret
    for file in (tmp_path / "keys").iterdir():
        assert secret not in file.read_bytes() and secret.hex().encode() not in file.read_bytes()
        assert TENANT.hex() not in file.name, "a tenant can be told by the file's name"


async def test_a_key_is_asked_for_again_after_its_time_and_a_missing_one_sooner() -> None:
    clock, store = VirtualClock(), MemoryKeys()
    keys = StoredKeys(store, sample_keyring(), clock)
    assert (keys.peek(TENANT), keys.find(TENANT), keys.peek(TENANT)) == (Miss.LATE, Miss.NO_KEY, Miss.NO_KEY)
    assert store.reads == 1
    await clock.sleep(ABSENT_S + 0.1)
    key = keys.obtain(TENANT)
    assert keys.peek(TENANT) is key and store.reads == 2
    await clock.sleep(KEY_CACHE_S - 0.1)
    assert keys.find(TENANT) is key and store.reads == 2
    store.destroy(keys.name_of(TENANT))
    await clock.sleep(0.2)
    assert keys.peek(TENANT) is Miss.LATE and keys.find(TENANT) is Miss.NO_KEY
    assert keys.obtain(TENANT).secret != key.secret, "a new key, which opens nothing of the old one's"


async def test_nothing_is_encrypted_with_a_key_long_after_it_was_destroyed() -> None:
    """What was read shortly before is used: a store is not asked for each block."""
    clock, store = VirtualClock(), MemoryKeys()
    keys = StoredKeys(store, sample_keyring(), clock)
    old = (await obtain(keys, [TENANT], 5.0))[TENANT]
    await clock.sleep(RECENT_S - 0.1)
    assert (await obtain(keys, [TENANT], 5.0))[TENANT] is old and store.reads == 1
    store.destroy(keys.name_of(TENANT))
    await clock.sleep(0.2)
    assert keys.find(TENANT) is old, "what is there can be read a while longer"
    new = (await obtain(keys, [TENANT], 5.0))[TENANT]
    assert new.secret != old.secret and keys.peek(TENANT) is new
    await clock.sleep(RECENT_S + 0.1)
    reads = store.reads
    assert (await obtain(keys, [TENANT], 5.0))[TENANT].secret == new.secret and store.reads == reads + 1
    await clock.sleep(RECENT_S + 0.1)
    store.error = TierError("keys", "read", "gone")
    with pytest.raises(KeyUnavailable, match="gone"):
        await obtain(keys, [TENANT], 5.0)
    assert isinstance(keys.peek(TENANT), DataKey)


def test_a_destroyed_key_leaves_no_copy_in_its_directory(tmp_path: Path) -> None:
    """Not in what a process that was killed between two steps left, either."""
    keys = stored(tmp_path / "keys")
    keys.obtain(TENANT)
    name = keys.name_of(TENANT)
    file = tmp_path / "keys" / f"{name}.key"
    text = file.read_bytes()
    (tmp_path / "keys" / ".draft-0123").write_bytes(text)
    kept = file.open("rb")
    assert keys.store.destroy(name) and not keys.store.destroy(name)
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["LOCK"]
    assert not kept.read().strip(b"\0"), "it was overwritten"
    kept.close()


def test_rotation_wraps_every_key_anew_and_leaves_them_what_they_were(tmp_path: Path) -> None:
    old, new = Key(b"old key ", bytes(32)), Key(b"new key ", bytes([1] * 32))
    before = stored(tmp_path / "keys", keyring=_ring(old))
    secrets = {scope: before.obtain(scope).secret for scope in (SHARED, TENANT)}
    both = stored(tmp_path / "keys", keyring=_ring(new, Key(b"old key ", bytes(32), KeyState.ACCEPT)))
    names = list(both.store.names())
    assert [both.rewrap(name) for name in names] == [True, True]
    assert [both.rewrap(name) for name in names] == [False, False]
    for name in names:
        found = both.store.read(name)
        assert found is not None and wrapping_key_of(found) == b"new key "
    after = stored(tmp_path / "keys", keyring=_ring(new))
    assert {scope: after.obtain(scope).secret for scope in secrets} == secrets
    assert stored(tmp_path / "keys", keyring=_ring(old)).find(TENANT) is Miss.NO_KEY


def test_a_key_of_another_keyring_is_a_miss_and_is_not_replaced(tmp_path: Path) -> None:
    mine = stored(tmp_path / "keys")
    secret = mine.obtain(TENANT).secret
    old = Key(bytes([1] * 8), bytes([1] * 32), KeyState.RETIRED)
    retired = Keyring([Key(b"new key ", bytes([9] * 32)), old], bytes([1] * 32))
    other = stored(tmp_path / "keys", keyring=retired)
    assert other.find(TENANT) is Miss.NO_KEY
    with pytest.raises(TierError, match="retired"):
        other.obtain(TENANT)
    assert stored(tmp_path / "keys").obtain(TENANT).secret == secret


def test_a_wrapped_key_does_not_open_under_another_tenants_name_or_time(tmp_path: Path) -> None:
    keys = stored(tmp_path / "keys")
    keys.obtain(TENANT)
    mine, theirs = (tmp_path / "keys" / f"{keys.name_of(scope)}.key" for scope in (TENANT, SHARED))
    theirs.write_bytes(mine.read_bytes())
    assert keys.find(SHARED) is Miss.NO_KEY
    found = json.loads(mine.read_text())
    mine.write_text(json.dumps({**found, "created": found["created"] + 1}))
    assert stored(tmp_path / "keys").find(TENANT) is Miss.NO_KEY


async def test_a_store_that_hangs_is_asked_once_and_waited_for_no_longer_than_the_deadline() -> None:
    """Its thread is its own: other work of the loop goes on, and so does the end of the process."""
    gate = threading.Event()

    class Hanging(MemoryKeys):
        def read(self, name: str) -> WrappedKey | None:
            names.append(name)
            gate.wait(20)
            return None

    names: list[str] = []
    store = Hanging()
    keys = StoredKeys(store, sample_keyring(), VirtualClock())
    try:
        found = await asyncio.gather(*(load(keys, [TENANT], 0.02) for _ in range(50)))
        assert found == [{TENANT: Miss.NO_KEY}] * 50
        await until(lambda: len(names) > 0)
        assert names == [keys.name_of(TENANT)]
        with pytest.raises(TierError, match="does not answer"):
            await obtain(keys, [TENANT], 0.02)
        others = [scope_of(str(number)) for number in range(100)]
        assert set((await load(keys, others, 0.02)).values()) == {Miss.NO_KEY}
        await until(lambda: len(names) >= ASKING_MAX)
        assert len(names) == ASKING_MAX and 0 < _asking() <= ASKING_MAX
        assert await asyncio.to_thread(lambda: 7) == 7
    finally:
        gate.set()
    await until(lambda: not _asking())
    assert isinstance((await load(keys, [TENANT], 5.0))[TENANT], DataKey), "the call that was given up made it"


async def test_a_key_whose_store_hangs_keeps_no_other_tenant_waiting() -> None:
    gate = threading.Event()

    class Hanging(MemoryKeys):
        def read(self, name: str) -> WrappedKey | None:
            if name == bad:
                gate.wait(20)
            return super().read(name)

    keys = StoredKeys(Hanging(), sample_keyring(), VirtualClock())
    bad = keys.name_of(TENANT)
    assert await load(keys, [TENANT], 0.01) == {TENANT: Miss.NO_KEY}
    try:
        assert isinstance((await obtain(keys, [SHARED], 5.0))[SHARED], DataKey)
    finally:
        gate.set()


def test_that_there_was_no_key_does_not_hide_the_one_made_meanwhile() -> None:
    class Slow(MemoryKeys):
        def read(self, name: str) -> WrappedKey | None:
            found = super().read(name)
            if self.reads == 1:
                keys.obtain(TENANT)
            return found

    keys = StoredKeys(Slow(), sample_keyring(), VirtualClock())
    assert isinstance(keys.find(TENANT), DataKey) and isinstance(keys.peek(TENANT), DataKey)


async def test_the_seventeenth_asker_waits_for_one_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.data_keys.READ_S", 60.0)
    gate, began = threading.Event(), []

    class Slow:
        def peek(self, scope: Scope) -> Miss:
            return Miss.LATE

        def find(self, scope: Scope) -> Miss:
            began.append(scope)
            gate.wait(10)
            return Miss.NO_KEY

    scopes = [scope_of(str(number)) for number in range(ASKING_MAX + 20)]
    slow = cast("StoredKeys", Slow())
    asked = asyncio.create_task(load(slow, scopes, 120.0))
    try:
        await until(lambda: len(began) >= ASKING_MAX)
        assert 0 < _asking() <= ASKING_MAX and not asked.done()
        assert set((await load(slow, [scope_of("last")], 0.01)).values()) == {Miss.NO_KEY}, "and no longer than it may"
    finally:
        gate.set()
    assert set((await asked).values()) == {Miss.NO_KEY}
    assert len(began) <= len(scopes) + 1


def _asking() -> int:
    return sum(thread.name == "kvtier-keys" for thread in threading.enumerate())


NO_KEYS = (b"", b"{}", b"[" * 4000, b'{"version": 2}', b"\xff" * 5000, b'{"version":1,"created":1.0,"wrapped":"00"}')


@pytest.mark.parametrize("text", NO_KEYS)
def test_a_file_that_is_no_key_is_a_miss_and_stays(tmp_path: Path, text: bytes) -> None:
    keys = stored(tmp_path / "keys")
    file = tmp_path / "keys" / f"{keys.name_of(TENANT)}.key"
    file.write_bytes(text)
    assert keys.find(TENANT) is Miss.NO_KEY
    with pytest.raises(TierError):
        keys.obtain(TENANT)
    with pytest.raises(CorruptError, match="no key of version 1"):
        keys.store.read(file.stem)
    assert file.read_bytes() == text


def test_a_link_or_a_pipe_in_place_of_a_key_is_no_key(tmp_path: Path) -> None:
    import os

    keys = stored(tmp_path / "keys")
    secret = keys.obtain(SHARED).secret
    file = tmp_path / "keys" / f"{keys.name_of(TENANT)}.key"
    file.symlink_to(tmp_path / "keys" / f"{keys.name_of(SHARED)}.key")
    assert keys.find(TENANT) is Miss.NO_KEY
    file.unlink()
    os.mkfifo(file)
    assert stored(tmp_path / "keys").find(TENANT) is Miss.NO_KEY
    assert stored(tmp_path / "keys").obtain(SHARED).secret == secret


def test_a_directory_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(ConfigError, match=r"security\.data_keys: .*chmod 700"):
        KeyDirectory(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"security\.data_keys: .*No such file"):
        KeyDirectory(tmp_path / "none" / "keys")


def test_a_process_that_holds_the_lock_is_not_waited_for_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_directory, "LOCK_S", 0.05)
    keys = stored(tmp_path / "keys")
    with keys.store._locked(), pytest.raises(TierError, match="another process holds"):  # type: ignore[attr-defined]
        stored(tmp_path / "keys").obtain(TENANT)


def test_no_path_is_made_of_a_name_that_is_none(tmp_path: Path) -> None:
    for name in ("../secret", "", "A" * 32, "0" * 31):
        with pytest.raises(ConfigError, match="32 hexadecimal digits"):
            KeyDirectory(tmp_path / "keys").read(name)


def _ring(*keys: Key) -> Keyring:
    return Keyring(keys, bytes(32))
