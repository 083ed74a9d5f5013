"""What blocks hold is kept in a ring of pages, apart from the index, and leaves with a purge."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import xxhash

from kvtier.errors import TierError, TierTimeout
from kvtier.identity.keys import scope_of, tenant_of
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import contents
from kvtier.tiers.disk.contents import PAGE_BYTES, PAGES_MIN, PURGES_KEPT, ContentRing, pages_for
from kvtier.tiers.protocol import CONTENT_BYTES_MAX, CONTENT_PART_BYTES, Miss
from tests.support.cpu import slowness, uncollected
from tests.tiers.disk.support.damage import flip
from tests.tiers.disk.support.store import BLOCK, get, opened, put

ONE, OTHER = tenant_of(scope_of("one")), tenant_of(scope_of("other"))
NAMESPACE = bytes(range(32))


def ring_at(part: Path, pages: int = 4) -> tuple[ContentRing, int]:
    ring = ContentRing(part, NAMESPACE, pages)
    return ring, ring.write(0, [], 0)[1]


def written(ring: ContentRing) -> list[tuple[int, list[bytes]]]:
    """All pages, the newest first."""
    out, below = [], 0
    while (found := ring.read(below))[0]:
        out.append(found)
        below = found[0]
        if below == 1:
            break
    return out


def test_pages_come_back_the_newest_first_and_the_oldest_give_way(tmp_path: Path) -> None:
    ring, purges = ring_at(tmp_path)
    assert written(ring) == []
    pages = {number: [b"%d" % number * 100, b"x" * number * 8] for number in range(1, 9)}
    for number in range(1, 7):
        assert ring.write(0, pages[number], purges) == (number, purges, [])
    right = [(number, pages[number]) for number in (6, 5, 4, 3)]
    assert written(ring) == right == written(ring_at(tmp_path)[0]), "another process sees the same"
    assert ring.write(5, [*pages[5], b"longer"], purges) == (5, purges, [])
    assert ring.write(2, pages[2], purges) == (7, purges, []), "its place is another page's"
    assert [number for number, _ in written(ring)] == [7, 6, 5, 4] and ring.read(6) == (5, [*pages[5], b"longer"])
    full = [bytes(CONTENT_BYTES_MAX - CONTENT_PART_BYTES)]
    assert ring.write(0, full, purges)[0] == 8 and ring.read(0) == (8, full)
    with pytest.raises(ValueError, match="too large"):
        ring.write(0, [*full, b""], purges)
    assert (tmp_path / "contents" / NAMESPACE.hex()).stat().st_size == 5 * PAGE_BYTES
    assert (tmp_path / "contents" / NAMESPACE.hex()).stat().st_mode & 0o777 == 0o600


def test_a_purge_takes_the_tenants_parts_and_says_so_to_writers(tmp_path: Path) -> None:
    ring, purges = ring_at(tmp_path)
    one, other = ONE[:8] + b"tokens of one", OTHER[:8] + b"tokens of the other"
    for parts in ([one], [other, one, other], [other]):
        ring.write(0, parts, purges)
    assert ring.purge(ONE) == 2
    assert written(ring) == [(3, [other]), (2, [other, other]), (1, [])]
    assert b"of one" not in (tmp_path / "contents" / NAMESPACE.hex()).read_bytes()
    assert ring.write(2, [one], purges) == (0, purges + 1, [ONE[:8]]) and ring.read(3) == (2, [other, other])
    assert ring.write(0, [one], purges + 1) == (4, purges + 1, []), "that of a later request"
    ring.purge(OTHER)
    assert ring.write(0, [one], purges) == (0, purges + 2, [ONE[:8], OTHER[:8]])
    for _ in range(PURGES_KEPT - 2):
        ring.purge(OTHER)
    known = ring.write(0, [one], purges)[2]
    assert known is not None and len(known) == PURGES_KEPT and known[0] == ONE[:8]
    ring.purge(OTHER)
    assert ring.write(0, [one], purges)[2] is None, "nobody knows any more whose the first was"


def test_damage_costs_a_page_and_a_purge_takes_it_too(tmp_path: Path) -> None:
    ring, purges = ring_at(tmp_path)
    for number in range(3):
        ring.write(0, [ONE[:8] + b"%d tokens" % number], purges)
    path = tmp_path / "contents" / NAMESPACE.hex()
    flip(path, 2 * PAGE_BYTES + 33)
    assert [number for number, _ in written(ring)] == [3, 1]
    assert ring.purge(OTHER) == 0
    assert b"1 tokens" not in path.read_bytes() and [number for number, _ in written(ring)] == [3, 1]
    flip(path, 20)
    assert written(ring) == []
    again, later = ring_at(tmp_path)
    assert later > purges and again.write(0, [ONE[:8]], later) == (1, later, [])
    assert again.write(0, [ONE[:8]], purges)[2] is None
    assert b"tokens" not in path.read_bytes()


def test_a_store_of_another_capacity_begins_anew(tmp_path: Path) -> None:
    ring, purges = ring_at(tmp_path)
    ring.write(0, [b"tokens"], purges)
    wider = ContentRing(tmp_path, NAMESPACE, 5)
    assert wider.read(0) == (0, [])
    assert wider.purge(OTHER) == 0 and (tmp_path / "contents" / NAMESPACE.hex()).stat().st_size == 0


def test_a_block_of_16_tokens_has_room_for_70_bytes() -> None:
    assert pages_for(0, 16) == PAGES_MIN
    assert 69 << 20 < pages_for(1 << 20, 16) * PAGE_BYTES <= 70 << 20
    assert pages_for(1 << 40, 16) * PAGE_BYTES == contents.BYTES_MAX


def test_other_namespaces_contents_are_bounded_together(tmp_path: Path) -> None:
    """By as much as the namespace's own: the directory keeps its bound (test_directory_bound.py)."""
    for number in range(4):
        ring = ContentRing(tmp_path, bytes([number]) * 32, 1)
        ring.write(0, [b"x"], ring.write(0, [], 0)[1])
        os.utime(tmp_path / "contents" / (bytes([number]) * 32).hex(), (number, number))
    assert len(list((tmp_path / "contents").iterdir())) == 2, "the newest, and one more"


def test_parts_that_are_longer_than_their_page_are_damage() -> None:
    for body in (b"x", b"\x09\0\0\0tenant-1"):
        rest = struct.pack("<QI", 3, len(body)) + body
        raw = xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest
        assert contents._decoded(raw.ljust(PAGE_BYTES, b"\0")) == (0, [])


def test_a_process_that_stands_still_with_the_file_costs_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "LOCK_TIMEOUT_S", 0.01)
    ring, purges = ring_at(tmp_path)
    fd = os.open(tmp_path / "contents" / NAMESPACE.hex(), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for verb in (lambda: ring.write(0, [b"x"], purges), lambda: ring.read(0)):
        with pytest.raises(TierTimeout):
            verb()
    os.close(fd)
    assert ring.read(0) == (0, [])


@pytest.mark.parametrize("cause", ["held", "unreadable", "symlink", "pipe", "folder", "file as folder"])
def test_a_purge_that_cannot_change_the_file_removes_it(
    tmp_path: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge of blocks would fail with it, again and again, and take the tier out of service."""
    monkeypatch.setattr(contents, "PURGE_TIMEOUT_S", 0.01, raising=False)
    ring, purges = ring_at(tmp_path)
    ring.write(0, [ONE[:8] + b"tokens"], purges)
    path, own, elsewhere = tmp_path / "contents" / NAMESPACE.hex(), os.getpid(), tmp_path / "elsewhere"
    held = os.open(path, os.O_RDWR)
    if cause == "held":  # by a process that stands still
        fcntl.flock(held, fcntl.LOCK_EX)
    elif cause == "unreadable":
        real = os.pread

        def failing(fd: int, length: int, offset: int) -> bytes:
            if offset and os.getpid() == own:
                raise OSError(errno.EIO, "unreadable")
            return real(fd, length, offset)

        monkeypatch.setattr(contents.os, "pread", failing)
    else:
        elsewhere.write_bytes(path.read_bytes())
        shutil.rmtree(path.parent)
        if cause == "file as folder":
            path.parent.touch()
        else:
            path.parent.mkdir()
            {"symlink": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
                cause
            ]()
    assert ring.purge(ONE) == 0
    monkeypatch.undo()
    assert not path.is_file() and not path.is_symlink() and ring.purge(ONE) == 0
    if cause not in ("folder", "file as folder"):
        assert ring.write(0, [ONE[:8] + b"tokens"], purges)[::2] == (0, None), "nobody knows what was purged"
    assert not elsewhere.exists() or b"tokens" in elsewhere.read_bytes(), "what a link leads to is none of ours"
    os.close(held)


def test_thousands_of_purges_do_not_look_through_the_file_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 30 ms of CPU for 32 MiB: a replica that missed ten thousand purges did not use G3 for half an hour."""
    monkeypatch.setattr(contents, "SCANS_S", 0.02, raising=False)
    monkeypatch.setattr(contents, "SCANS_SHARE", 0.0, raising=False)
    ring, purges = ring_at(tmp_path, 256)
    for _ in range(256):
        ring.write(0, [OTHER[:8] + bytes(380)] * 40, purges)
    with uncollected():
        began = time.thread_time()
        for number in range(200):
            assert ring.purge(tenant_of(scope_of(str(number)))) == 0
        spent = time.thread_time() - began
    assert spent < 0.2 * slowness() and not (tmp_path / "contents" / NAMESPACE.hex()).exists()


def test_a_purge_is_durable_also_where_the_file_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, purges = ring_at(tmp_path)
    ring.write(0, [ONE[:8] + b"tokens"], purges)
    synced = list[int]()
    monkeypatch.setattr(contents.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    ContentRing(tmp_path, NAMESPACE, 5).purge(ONE)
    assert synced == [0]


def test_the_file_that_is_changed_is_the_one_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removed the one that was opened, and began another, before it could be locked."""
    ring, purges = ring_at(tmp_path)
    ring.write(0, [OTHER[:8] + b"others"], purges)
    path, real = tmp_path / "contents" / NAMESPACE.hex(), fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(contents.fcntl, "flock", real)
        path.unlink()
        again, begun = ring_at(tmp_path)
        again.write(0, [ONE[:8] + b"tokens"], begun)
        real(fd, how)

    monkeypatch.setattr(contents.fcntl, "flock", late)
    assert ring.purge(ONE) == 1 and b"tokens" not in path.read_bytes()


async def test_a_tier_keeps_them_over_a_restart_and_purges_them_with_the_blocks(tmp_path: Path) -> None:
    clock, chain = VirtualClock(), chain_of(sample_namespace(BLOCK), 2, scope=ONE)
    parts = [ONE + b"tokens", OTHER + b"others"]
    async with opened(tmp_path / "g3", clock=clock) as tier:
        await put(tier, chain)
        _, purges, _ = await tier.write_contents(0, [], 0)
        assert await tier.write_contents(0, parts, purges) == (1, purges, [])
    async with opened(tmp_path / "g3", clock=clock) as tier:
        assert await tier.read_contents(0) == (1, parts)
        assert await tier.purge(ONE, clock.wall()) == 2
        assert await tier.read_contents(0) == (1, parts[1:])
        clock.advance(1.0)
        await put(tier, chain)
        assert await get(tier, chain) == [True, True]
        assert await tier.write_contents(1, parts, purges) == (0, purges + 1, [ONE[:8]])


async def test_a_file_that_fails_costs_no_block_but_a_purge_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chain = VirtualClock(), chain_of(sample_namespace(BLOCK), 2, scope=ONE)
    async with opened(tmp_path / "g3", clock=clock) as tier:
        await put(tier, chain)
        (tmp_path / "g3" / "contents").mkdir()
        (tmp_path / "g3" / "contents" / sample_namespace(BLOCK).digest.hex()).mkdir()
        assert await tier.write_contents(0, [ONE], 1) == (0, 0, None)
        assert await tier.read_contents(0) == (0, [])
        assert await get(tier, chain) == [True, True]
        assert await tier.purge(ONE, clock.wall()) == 2, "a folder is none of the tier's"
        assert await get(tier, chain) == [Miss.ABSENT, Miss.ABSENT]

        def fails(_path: Path) -> None:
            raise PermissionError("read-only")

        monkeypatch.setattr(Path, "unlink", fails)
        with pytest.raises(TierError, match="purge"):
            await tier.purge(OTHER, clock.wall())
        monkeypatch.undo()
        assert await tier.purge(OTHER, clock.wall()) == 0
