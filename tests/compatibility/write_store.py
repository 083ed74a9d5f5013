"""Write a small G3 directory and G4 bucket that later releases must open, and say what they must serve from it.

    python tests/compatibility/write_store.py FOLDER              FOLDER/g3, FOLDER/g4, FOLDER/manifest.json
    python tests/compatibility/write_store.py --pack v1 FOLDER    the same packed: FOLDER/v1.tar.xz, FOLDER/v1.json

What a chain must give at each moment is written down by hand in CHAINS: it follows from the terms, not from the code
that is tested. Time stands still but where it is told to pass, and every block is a pure function of its key: two runs
of one release differ in what is random or a matter of timing only (test_old_stores.py compares them).
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvtier
from kvtier.identity.keys import scope_of  # not public, alone here: no public name makes an adapter's scope
from kvtier.testing import VirtualClock, chain_of, payloads_of, sample_namespace

START = 1_700_000_000
"""Wall time of the first write: in the past for whoever runs this, and whole seconds, as a tar keeps them."""

MOMENTS = {"soon": START + 41 * 60, "hour": START + 75 * 60, "day": START + 10 * 3600, "year": START + 400 * 86400}
"""When the store is opened again: before anything ends; after what lives for an hour unused; and so on."""

UPTIME_S = 1e9
"""No machine has been up for so long: the trusted time that the store remembers is never taken for this boot's."""

SECTIONS: dict[str, Any] = {
    "policy": "gapduel",
    "retention": {
        "quota": 0.9,
        "classes": {
            "forever": {"priority": 90},
            "week": {"ttl": "7d"},
            "low": {"ttl": "1d", "priority": 5},
            "fixed": {"max_age": "1h"},
            "promised": {"ttl": "2d", "guarantee": True},
            "ram": {"ceiling": "g2"},
            "local": {"ceiling": "g3"},
            "private": {"ttl": "1d", "isolate": True},
        },
    },
    "security": {"scope_secret": "known to every replica"},
    # Nothing is missed because the machine is busy.
    "deadlines": {"lookup": "60s", "get": "60s", "put": "60s", "flush": "60s", "close": "60s"},
}
G2 = "1MiB"
G3_FIRST, G3_GROWN = "128KiB", "1MiB"
"""The store is made small, so that its segments are, and grows before the second session."""
STRIDE = 4

NAMESPACES = {
    # Blocks that fill no slot and start nowhere round in an object; and larger ones of two ranks, so two slot classes.
    "small": sample_namespace(1000),
    "large": sample_namespace(6000, model="test/larger", layout="L2NHD", ranks=2, ranks_served=2, tp=2, group="mla"),
}


@dataclass(frozen=True)
class Chain:
    """A prompt's blocks. `g3` and `g4`: how many of them must be served from there at each of MOMENTS; "": like g3."""

    name: str
    blocks: int
    retention: Any
    g3: str
    g4: str = ""
    salt: str | bytes | None = None
    namespace: str = "small"
    isolated: str = ""
    adapter: bytes = b""
    keyed: bool = True

    @property
    def served(self) -> dict[str, dict[str, int]]:
        """Leading blocks by tier and moment."""
        counts = {"g3": self.g3.split(), "g4": (self.g4 or self.g3).split()}
        return {tier: dict(zip(MOMENTS, map(int, row), strict=True)) for tier, row in counts.items()}


CHAINS = {
    chain.name: chain
    for chain in (
        # Made at START, in the directory's first size; it grows later.
        Chain("conversation", 14, "24h", "14 14 14 0"),
        Chain("tenant", 6, "week", "6 6 6 0", salt="tenant"),
        # A minute later. Who may share:
        Chain("unkeyed", 3, "week", "3 3 3 0", salt="tenant", keyed=False),
        Chain("binary salt", 2, "forever", "2 2 2 2", salt=b"\xff\0"),
        Chain("empty salt", 2, "forever", "2 2 2 2", salt=""),
        Chain("isolated", 4, "private", "4 4 4 0", isolated="private"),
        Chain("adapter", 5, "forever", "5 5 5 5", salt="tenant", adapter=b"lora:1"),
        # How long, how deep, and what leaves first:
        Chain("forever", 9, "forever", "9 9 9 9"),
        Chain("low", 2, "low", "2 2 2 0"),
        Chain("fixed", 3, "fixed", "3 0 0 0"),
        Chain("unused", 4, "1h", "4 0 0 0"),
        Chain("used", 4, "1h", "4 4 0 0"),
        Chain("twice", 3, "fixed", "3 3 3 0"),  # and under "week" a second later
        # Six blocks for ever and two for an hour: G4 keeps or loses a stride as a whole.
        Chain("ranges", 8, [(0, 96, "forever"), (96, 128, "1h")], "8 6 6 6", "8 4 4 4"),
        Chain("in memory", 3, "ram", "0 0 0 0"),
        Chain("local", 3, "local", "3 3 3 3", "0 0 0 0"),
        Chain("promised", 4, "promised", "4 4 4 0"),
        Chain("pinned", 6, "5m", "6 6 6 6"),
        # Gone for good; and what the same tenant stored a second later.
        Chain("purged", 5, "forever", "0 0 0 0", salt="gone"),
        Chain("after the purge", 2, "week", "2 2 2 0", salt="gone"),
        # In the other namespace, and last of all what ends first.
        Chain("large", 5, "24h", "5 5 5 0", namespace="large"),
        Chain("large tenant", 3, "forever", "3 3 3 3", salt="tenant", namespace="large"),
        Chain("brief", 3, "5m", "3 0 0 0"),
    )
}
PIN, PIN_TTL = "manuals/system:v1", "731d"


class LateClock(VirtualClock):
    """A clock of a machine that has been up for longer than any other."""

    def monotonic(self) -> float:
        return super().monotonic() + UPTIME_S


def config(folder: Path, capacity: str = G3_GROWN) -> kvtier.Config:
    """The configuration over the directory and the bucket in `folder`."""
    g3 = {"path": [str(folder / "g3" / part) for part in ("a", "b")], "capacity": capacity}
    g4 = {"url": f"file://{folder.resolve()}/g4", "stride": STRIDE}
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": G2}, "g3": g3, "g4": g4}, **SECTIONS})


def keys_of(cache: kvtier.Cache, chain: Chain) -> list[bytes]:
    """The chain's keys, as this release computes them; no other chain begins with its first token."""
    number, size = list(CHAINS).index(chain.name), cache.namespace.block_tokens
    tokens = [2**32 - 1 - number, *range(1, chain.blocks * size)]
    if chain.adapter:
        scope = scope_of(chain.salt, chain.adapter, secret=cache.config.scope_secret)
        return list(chain_of(cache.namespace, chain.blocks, number, scope))
    if not chain.keyed:
        return kvtier.chain_hashes(tokens, cache.namespace, chain.salt)
    return cache.chain_hashes(tokens, chain.salt, chain.isolated or None)


class Writer:
    """Fills the directory and the bucket in `folder`, in several sessions, as processes do that come and go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock = LateClock(START)
        self._keys: dict[str, list[bytes]] = {}
        self._purged: dict[Path, tuple[bytes, int]] = {}  # objects, and when they were used last
        (folder / "g3").mkdir(parents=True)

    def write(self) -> dict[str, Any]:
        """Everything; returns the manifest."""
        with self._session(G3_FIRST) as cache:
            self._put(cache, "conversation", stop=10)
            self._put(cache, "tenant")
        self._clock.advance(60)
        with self._session() as cache:
            first, last = list(CHAINS).index("unkeyed"), list(CHAINS).index("purged")
            for name in list(CHAINS)[first : last + 1]:
                self._put(cache, name, also="week" if name == "twice" else None)
            cache.pins.create(PIN, self._keys["pinned"], PIN_TTL)
            self._clock.advance(35 * 60)
            cache.get(self._keys["used"]).release()  # past half of its time, so the bucket is told of it, too
            cache.flush()
        self._purge("gone")
        with self._session() as cache:
            self._put(cache, "conversation")
            self._put(cache, "after the purge")
        with self._session(namespace="large") as cache:
            self._put(cache, "large")
            self._put(cache, "large tenant")
        self._clock.advance(START + 40 * 60 - self._clock.wall())
        with self._session() as cache:
            self._put(cache, "brief")
        self._put_back()
        return self._manifest()

    @contextmanager
    def _session(self, capacity: str = G3_GROWN, namespace: str = "small") -> Iterator[kvtier.Cache]:
        with kvtier.open(config(self._folder, capacity), NAMESPACES[namespace], clock=self._clock) as cache:
            yield cache
            cache.check()  # what the policy has learned is complete then, whatever the pace of its housekeeping

    def _put(self, cache: kvtier.Cache, name: str, *, stop: int | None = None, also: str | None = None) -> None:
        """Store a chain's blocks before `stop`; `also`: a second later under another class, before its tail is fed."""
        chain = CHAINS[name]
        self._keys[name] = keys_of(cache, chain)
        keys = self._keys[name][:stop]
        for retention in (chain.retention, also):
            if retention is None:
                continue
            self._clock.advance(1)  # a request a second: objects that tell of writes are named by their time
            cache.get(keys).release()  # as a request does: looked up, then stored
            stored = cache.put(keys, payloads_of(keys, cache.namespace.block_bytes), retention)
            assert stored == len(keys), f"{name}: {stored} of {len(keys)} blocks were taken in"
        # One chain after another, so that no timing decides what lies in one object, and no clock moves meanwhile.
        assert cache.flush().pending == 0, f"{name}: not flushed"

    def _purge(self, salt: str) -> None:
        """Purge a tenant, and remember its objects. A second later it may store again."""
        units = [path for path in self._folder.glob("g4/units/**/*") if path.is_file()]
        there = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in units}
        with self._session() as cache:
            assert cache.purge(salt) >= len(self._keys["purged"])
        self._purged = {path: it for path, it in there.items() if not path.exists()}
        self._clock.advance(1)

    def _put_back(self) -> None:
        """Purged objects, as a replica leaves them that was still writing: it is the tombstone that must keep them from
        being served. At the end, since whoever uses the bucket sweeps them sooner or later."""
        assert self._purged and not any(path.exists() for path in self._purged), "the purge deleted nothing"
        for path, (raw, used_ns) in self._purged.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
            os.utime(path, ns=(used_ns, used_ns))

    def _manifest(self) -> dict[str, Any]:
        chains = [
            {
                "name": chain.name,
                "namespace": chain.namespace,
                "scope": self._keys[chain.name][0][:16].hex(),
                "hashes": [key[16:].hex() for key in self._keys[chain.name]],
                "served": chain.served,
            }
            for chain in CHAINS.values()
        ]
        tiers = {"g2": G2, "g3": G3_GROWN, "parts": ["a", "b"], "stride": STRIDE}
        pins = [{"name": PIN, "namespace": "small", "chain": "pinned"}]
        namespaces = {name: namespace.fields() for name, namespace in NAMESPACES.items()}
        return {
            "start": START, "moments": MOMENTS, "tiers": tiers, "sections": SECTIONS, "namespaces": namespaces,
            "pins": pins, "chains": chains, "bucket": 2, "index": 3,
        }  # fmt: skip


def write(folder: Path) -> dict[str, Any]:
    """Fill `folder`, which has no store yet; returns the manifest, which lies there too."""
    manifest = Writer(folder).write()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def pack(folder: Path, archive: Path) -> None:
    """Directory and bucket as one archive, without the user and the hours of this machine. Modification times of the
    bucket are kept: they are the times of last use."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if member.isdir() or not member.name.startswith("g4/"):
            member.mtime = START
        return member

    with tarfile.open(archive, "w:xz", format=tarfile.GNU_FORMAT, preset=9) as tar:
        for name in ("g4", "g3/a/slab", "g3/b", "g3/a"):  # alike close to alike: what both tiers hold is stored once
            for path in sorted((folder / name).rglob("*")):
                if path.is_file() and (name != "g3/a" or path.parent.name != "slab"):
                    tar.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=plain)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a store that later releases must open.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pack", metavar="NAME", help="pack it as FOLDER/NAME.tar.xz, with its manifest NAME.json")
    options = parser.parse_args()
    if options.pack is None:
        write(options.folder)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        write(Path(place) / "store")
        pack(Path(place) / "store", options.folder / f"{options.pack}.tar.xz")
        (options.folder / f"{options.pack}.json").write_bytes((Path(place) / "store" / "manifest.json").read_bytes())


if __name__ == "__main__":
    main()
