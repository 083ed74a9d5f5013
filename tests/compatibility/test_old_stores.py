"""What earlier releases left on disks and in buckets is opened and served by this one, and this one writes the same.

`stores/NAME.tar.xz` holds a G3 directory and a G4 bucket as write_store.py left them, `stores/NAME.json` what must be
served from them at which moment. Only public names are used, so that modules may move; the bytes themselves are read as
docs/format.md has them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tarfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash

import kvtier
from kvtier.cli import main
from kvtier.testing import payload_of, payloads_of
from tests.compatibility.write_store import NAMESPACES, LateClock, write

STORES = sorted((Path(__file__).parent / "stores").glob("*.json"))
NEWEST = STORES[-1]
"""The one that write_store.py, as it is now, writes."""

TIERS = ("g3", "g4")
BLOCK = NAMESPACES["small"].block_bytes


@dataclass(frozen=True)
class Store:
    """A store of an earlier release, unpacked into `folder`, and what its manifest says of it."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def parts(self) -> list[Path]:
        return [self.folder / "g3" / part for part in self.manifest["tiers"]["parts"]]

    @property
    def bucket(self) -> int:
        """Layout of the bucket."""
        return int(self.manifest.get("bucket", 1))

    @property
    def index_format(self) -> int:
        """Format of the directory's index."""
        return int(self.manifest.get("index", 1))

    def namespace(self, name: str) -> kvtier.Namespace:
        return kvtier.Namespace.parse(self.manifest["namespaces"][name])

    def moment(self, name: str) -> float:
        return float(self.manifest["moments"][name])

    def raw(self, tiers: tuple[str, ...] = TIERS, root: Path | None = None) -> dict[str, Any]:
        """A configuration of these lower tiers; "new" is a G3 of its own, empty at first."""
        known, root = self.manifest["tiers"], self.folder if root is None else root
        lower: dict[str, Any] = {}
        if "g3" in tiers or "new" in tiers:
            paths = [root / "g3" / part for part in known["parts"]] if "g3" in tiers else [self.folder / "new"]
            lower["g3"] = {"path": [str(path) for path in paths], "capacity": known["g3"]}
        if "g4" in tiers:
            lower["g4"] = {"url": f"file://{self.folder}/g4", "stride": known["stride"]}
        return {"tiers": {"g2": {"capacity": known["g2"]}, **lower}, **self.manifest["sections"]}

    @contextmanager
    def opened(
        self, moment: str, tiers: tuple[str, ...] = TIERS, namespace: str = "small", root: Path | None = None
    ) -> Iterator[kvtier.Cache]:
        config = kvtier.Config.parse(self.raw(tiers, root))
        with kvtier.open(config, self.namespace(namespace), clock=LateClock(self.moment(moment))) as cache:
            yield cache
            cache.check()

    def chains(self, namespace: str) -> Iterator[tuple[str, list[bytes], Mapping[str, Mapping[str, int]]]]:
        """Name, keys, and how many of them must be served by tier and moment."""
        for chain in self.manifest["chains"]:
            if chain["namespace"] == namespace:
                scope, served = bytes.fromhex(chain["scope"]), chain["served"]
                if self.bucket < 2:  # its objects lie under names that are not looked for any more
                    served = {**served, "g4": dict.fromkeys(served["g4"], 0)}
                yield chain["name"], [scope + bytes.fromhex(one) for one in chain["hashes"]], served

    def keys(self, name: str) -> list[bytes]:
        return next(keys for space in self.manifest["namespaces"] for of, keys, _ in self.chains(space) if of == name)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each archive once; whoever opens what is in it takes a copy."""
    folder = tmp_path_factory.mktemp("stores")

    def unpack(name: str) -> Path:
        place = folder / name
        if not place.exists():
            with tarfile.open(Path(__file__).parent / "stores" / f"{name}.tar.xz") as tar:
                tar.extractall(place, filter="data")
        return place

    return unpack


@pytest.fixture
def bucket(store: Store) -> Store:
    """A store whose bucket has the layout of today."""
    if store.bucket < 2:
        pytest.skip("its bucket is not read any more: test_an_old_bucket_is_missed_and_left_as_it_is")
    return store


@pytest.fixture(params=[path.stem for path in STORES])
def store(request: pytest.FixtureRequest, unpacked: Callable[[str], Path], tmp_path: Path) -> Store:
    return copied(unpacked(request.param), tmp_path / "store", request.param)


def copied(unpacked: Path, place: Path, name: str) -> Store:
    shutil.copytree(unpacked, place, copy_function=thin_copy)
    return Store(place, json.loads((Path(__file__).parent / "stores" / f"{name}.json").read_text()))


def thin_copy(source: str, target: str) -> None:
    """Zeros as holes: an index is sparse, and a copy for each test is cheap then. Times are kept."""
    with open(source, "rb") as old, open(target, "wb") as new:
        while piece := old.read(1 << 16):
            if piece.count(0) == len(piece):
                new.seek(len(piece), os.SEEK_CUR)
            else:
                new.write(piece)
        new.truncate()
    shutil.copystat(source, target)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """A command of the shell at a moment, in this process: its exit status and the JSON that it wrote."""

    def run(moment: float, *words: object) -> tuple[int, Any]:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(time, "time", lambda: moment)
            main([*map(str, words), "--json"])
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)

    return run


def served(cache: kvtier.Cache, keys: list[bytes], tier: str) -> int:
    """Leading blocks that the cache serves, all from `tier`, each with its own bytes."""
    with cache.get(keys) as hit:
        assert hit.tiers == [tier] * len(hit)
        expected = payloads_of(keys[: len(hit)], cache.namespace.block_bytes)
        assert [bytes(block) for block in hit.blocks] == expected, "wrong bytes"
        return len(hit)


def found(cache: kvtier.Cache, store: Store, namespace: str, tier: str) -> dict[str, int]:
    return {name: served(cache, keys, tier) for name, keys, _ in store.chains(namespace)}


def expected(store: Store, namespace: str, tier: str, moment: str) -> dict[str, int]:
    return {name: counts[tier][moment] for name, _, counts in store.chains(namespace)}


# ── what must be served ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("moment", ["soon", "hour", "day", "year"])
def test_either_tier_serves_what_its_terms_still_allow_and_nothing_else(store: Store, tier: str, moment: str) -> None:
    """What was purged is a miss though its objects are in the bucket."""
    for namespace in store.manifest["namespaces"]:
        with store.opened(moment, (tier,), namespace) as cache:
            assert found(cache, store, namespace, tier) == expected(store, namespace, tier, moment)


def test_a_machine_that_has_the_bucket_alone_keeps_what_it_is_served(bucket: Store) -> None:
    """From G4 into a new G3, and the next time from there."""
    for tiers, tier in ((("new", "g4"), "g4"), (("new",), "g3")):
        with bucket.opened("soon", tiers, "large") as cache:
            assert found(cache, bucket, "large", tier) == expected(bucket, "large", "g4", "soon")
            assert cache.flush().pending == 0


def test_a_g3_in_a_process_of_its_own_serves_it_too(store: Store) -> None:
    config = kvtier.Config.parse(store.raw(("g3",)))
    clock = LateClock(store.moment("hour"))
    with kvtier.open(config, store.namespace("small"), clock=clock, computes=True) as cache:
        assert found(cache, store, "small", "g3") == expected(store, "small", "g3", "hour")


def test_both_tiers_together_serve_what_either_has(store: Store) -> None:
    with store.opened("hour") as cache:
        for name, keys, counts in store.chains("small"):
            with cache.get(keys) as hit:
                assert len(hit) == max(counts[tier]["hour"] for tier in TIERS), name
                assert [bytes(block) for block in hit.blocks] == payloads_of(keys[: len(hit)], BLOCK), name


def test_it_is_served_wherever_it_was_copied_to(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No path, device or boot of the machine that wrote it is in it that would matter."""
    place = tmp_path / "an other pläce"
    shutil.copytree(store.folder, place, copy_function=plain_copy)
    monkeypatch.chdir(place)
    with store.opened("soon", ("g3",), root=Path()) as cache:
        assert found(cache, store, "small", "g3") == expected(store, "small", "g3", "soon")
    moved = Store(place, store.manifest)
    with moved.opened("soon", ("g4",)) as cache:
        assert found(cache, moved, "small", "g4") == expected(moved, "small", "g4", "soon")


def plain_copy(source: str, target: str) -> None:
    """Every byte read and written, holes included, as `cp` to another file system does; times are kept."""
    Path(target).write_bytes(Path(source).read_bytes())
    shutil.copystat(source, target)


@pytest.mark.parametrize("tier", TIERS)
def test_pins_and_guarantees_are_known(store: Store, tier: str) -> None:
    (pin,) = store.manifest["pins"]
    known = [(pin["name"], len(store.keys(pin["chain"])))] if tier == "g3" or store.bucket > 1 else []
    with store.opened("soon", (tier,)) as cache:
        # Guarantees are the directory's that made them; pins are every replica's.
        promises = cache.stats()["requests"]["promises"]
        assert promises["guaranteed"] == (len(store.keys("promised")) if tier == "g3" else 0)
    with store.opened("year", (tier,)) as cache:
        assert [(one.name, one.blocks) for one in cache.pins.list()] == known


@pytest.mark.parametrize("without", ["g4", "g3"])
def test_either_tombstone_keeps_what_was_purged_from_coming_back(bucket: Store, without: str) -> None:
    """Each tier learns of a purge from the other, and what the tenant stored afterwards stays."""
    if without == "g4":
        for tombstone in list(bucket.folder.glob("g4/ctl/*/log/*")):
            tombstone.unlink()
    tiers = TIERS if without == "g4" else ("g4",)
    with bucket.opened("soon", tiers) as cache:
        assert cache.match(bucket.keys("purged")) == 0
        assert cache.match(bucket.keys("after the purge")) == len(bucket.keys("after the purge"))


def test_without_any_tombstone_they_would_be_served(bucket: Store) -> None:
    """The control: the bucket does hold the purged blocks, whole."""
    for tombstone in list(bucket.folder.glob("g4/ctl/*/log/*")):
        tombstone.unlink()
    with bucket.opened("soon", ("g4",)) as cache:
        assert served(cache, bucket.keys("purged"), "g4") == len(bucket.keys("purged"))


@pytest.mark.parametrize("tiers", [TIERS, ("g4",)])
def test_an_old_bucket_is_missed_and_left_as_it_is(store: Store, tiers: tuple[str, ...]) -> None:
    """By readers, writers, sweepers and purges of today: a fleet is upgraded replica by replica."""
    if store.bucket > 1:
        pytest.skip("the layout of today")
    old = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_in(store.folder / "g4")}
    assert len(old) > 20
    with store.opened("soon", tiers) as cache:
        for name, keys, counts in store.chains("small"):
            assert cache.match(keys) == (counts["g3"]["soon"] if "g3" in tiers else 0), name
        new = cache.chain_hashes([*range(5000, 5000 + 4 * cache.namespace.block_tokens)], "tenant")
        assert cache.put(new, payloads_of(new, BLOCK), "week") == len(new)
        assert cache.flush().durable["g4"] == len(new)
        cache.purge("tenant")
        assert cache.match(new) == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in old} == old


def ends_with(unit: Path, key: bytes) -> bool:
    """Whether a unit's last block is `key`: the count at 10, then 72 bytes from 208 on for each block."""
    raw = unit.read_bytes()[:4096]
    place = 208 + 72 * (int.from_bytes(raw[10:12], "little") - 1)
    return raw[64:80] + raw[place : place + 32] == key


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# ── what is written beside it ───────────────────────────────────────────────────────────────────────────────────────


def test_new_blocks_lie_beside_the_old_ones_and_both_survive(store: Store, run: Callable[..., Any]) -> None:
    new: dict[str, list[bytes]] = {}
    for namespace in store.manifest["namespaces"]:
        with store.opened("soon", namespace=namespace) as cache:
            new[namespace] = cache.chain_hashes(range(160), "newcomer")
            assert cache.put(new[namespace], payloads_of(new[namespace], cache.namespace.block_bytes), "forever") == 10
            assert cache.flush().durable == {"g3": 10, "g4": 10}
    for tier in TIERS:
        for namespace, keys in new.items():
            with store.opened("soon", (tier,), namespace) as cache:
                assert served(cache, keys, tier) == 10
                assert found(cache, store, namespace, tier) == expected(store, namespace, tier, "soon")
    status, told = run(store.moment("soon"), "verify", *store.parts)
    assert (status, told["sound"]) == (0, True)


def test_a_chain_that_was_begun_then_is_continued_now(store: Store) -> None:
    """Its last object, a tail, gives way to a full one."""
    keys = store.keys("conversation")
    with store.opened("soon") as cache:
        longer = cache.chain_hashes([2**32 - 1, *range(1, 18 * 16)])
        assert longer[: len(keys)] == keys, "the same prompt has other names now"
        assert cache.put(longer, payloads_of(longer, BLOCK)) == 18
        assert cache.flush().pending == 0
    for tier in TIERS:
        with store.opened("soon", (tier,)) as cache:
            assert served(cache, longer, tier) == 18


def test_what_was_learned_is_gone_on_with(store: Store) -> None:
    """The policy's state is taken from the note, and written again as it was, when nothing was learned since."""
    before = notes(store, "policy")
    with store.opened("soon", ("g3",)):
        pass
    assert before and notes(store, "policy") == before
    place = store.folder / "new"
    with store.opened("soon", ("new", "g4")):
        pass
    fresh = [raw for key, raw in index_of(place).items() if key.endswith(b"policy")]
    assert fresh and fresh[0] not in before.values(), "the control: a fresh start writes something else"


def notes(store: Store, name: str) -> dict[bytes, bytes]:
    found = index_of(store.parts[0])
    return {key: raw for key, raw in found.items() if key.startswith(b"mnote") and key[37:] == name.encode()}


# ── what the commands say ───────────────────────────────────────────────────────────────────────────────────────────


def test_inspect_and_verify_know_it(store: Store, run: Callable[..., Any]) -> None:
    status, told = run(store.moment("hour"), "verify", *store.parts)
    assert status == 0 and told["sound"] and told["books"] == "in order" and told["raced"] == told["removed"] == 0
    status, held = run(store.moment("hour"), "inspect", *store.parts)
    assert (
        status == 0 and held["format"] == store.index_format and held["unreadable_entries"] == held["dead_writers"] == 0
    )
    assert held["blocks"] == told["blocks"] == sum(one["blocks"] for one in held["namespaces"])
    assert held["segment_bytes"] < held["capacity_bytes"] / 2, "it was made smaller and has grown"
    by_digest = {store.namespace(name).digest.hex(): name for name in store.manifest["namespaces"]}
    assert {one["digest"] for one in held["namespaces"]} == set(by_digest)
    for one in held["namespaces"]:
        namespace = by_digest[one["digest"]]
        assert one["fields"] == store.manifest["namespaces"][namespace]
        alive = sum(expected(store, namespace, "g3", "hour").values())
        assert one["blocks"] - one["expired"] == alive
        assert one["expired"] == sum(expected(store, namespace, "g3", "soon").values()) - alive


def test_gc_deletes_what_has_ended(store: Store, run: Callable[..., Any]) -> None:
    status, told = run(store.moment("year"), "gc", *store.parts)
    left = sum(sum(expected(store, name, "g3", "year").values()) for name in store.manifest["namespaces"])
    assert (status, told["blocks"]) == (0, left)
    assert run(store.moment("year"), "verify", *store.parts)[1]["sound"]


@pytest.mark.parametrize("tier", TIERS)
def test_pin_list_shows_the_pins(store: Store, tier: str, run: Callable[..., Any], tmp_path: Path) -> None:
    (pin,) = store.manifest["pins"]
    (tmp_path / "kvtier.yaml").write_text(json.dumps(store.raw((tier,))))  # JSON is YAML, too
    (tmp_path / "namespace.json").write_text(json.dumps(store.manifest["namespaces"][pin["namespace"]]))
    words = ("pin", "list", tmp_path / "kvtier.yaml", "--namespace", tmp_path / "namespace.json")
    status, told = run(store.moment("year"), *words)
    known = [pin["name"]] if tier == "g3" or store.bucket > 1 else []
    assert status == 0 and [one["name"] for one in told["pins"]] == known


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("depth", [0, 5])
def test_a_flipped_byte_in_the_directory_is_a_miss(store: Store, depth: int, run: Callable[..., Any]) -> None:
    key = store.keys("forever")[depth]
    records = index_of(store.parts[0])
    (found,) = (one for one in records if one.startswith(b"b") and one.endswith(key))
    entry = Entry.of(name_in(records, found[1:]), records[found])
    flip(entry.file(store), entry.slot * entry.slot_bytes + BLOCK - 1)
    status, told = run(store.moment("soon"), "verify", *store.parts)
    assert (status, told["bad"], len(told["damaged"])) == (1, 1, 1)
    with store.opened("soon", ("g3",)) as cache:
        assert served(cache, store.keys("forever"), "g3") == depth


@pytest.mark.parametrize(("offset", "whole"), [(0, 4), (100, 4), (4096, 4), (4096 + BLOCK, 5), (-1, 7)])
def test_a_flipped_byte_in_an_object_is_a_miss(bucket: Store, offset: int, whole: int) -> None:
    """In the header, and in the first, second and last of the blocks 4 … 7 of a chain, which the object holds."""
    unit = next(path for path in files_in(bucket.folder / "g4" / "units") if ends_with(path, bucket.keys("forever")[7]))
    flip(unit, offset)
    with bucket.opened("soon", ("g4",)) as cache:
        assert served(cache, bucket.keys("forever"), "g4") == whole
    assert unit.exists() == (offset == 0), "a frame that failed its check twice is deleted, what is no frame left alone"


def flip(path: Path, offset: int) -> None:
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# ── the bytes themselves ────────────────────────────────────────────────────────────────────────────────────────────


_ENTRY = struct.Struct("<ddQIIQIQ16s")
_LIFE, _STAMP = struct.Struct("<dB"), struct.Struct("<dIIB")


@dataclass(frozen=True)
class Entry:
    """An entry of the index as docs/format.md has it. `told`: what two runs of one release agree about; serial, place
    and tick depend on how blocks came together in a transaction, which is a matter of timing."""

    segment: int
    slot: int
    length: int
    digest: bytes
    told: tuple[Any, ...]

    @classmethod
    def of(cls, name: bytes, raw: bytes) -> Entry:
        ends, born, _, segment, slot, length, depth, rank, digest = _ENTRY.unpack_from(raw)
        life, check = raw[_ENTRY.size : -8], int.from_bytes(raw[-8:], "little")
        count = life[8]  # from format 3 on with 128, and no bytes for stamps that are not there
        assert len(life) == _LIFE.size + (count & 127 if count & 128 else 4) * _STAMP.size
        assert check == xxhash.xxh3_64_intdigest(name + raw[:-8])
        return cls(segment, slot, length, digest, (ends, born, length, depth, rank >> 56, digest, life))

    @property
    def slot_bytes(self) -> int:
        return -(-self.length // 4096) * 4096

    def file(self, store: Store) -> Path:
        return store.parts[self.segment % len(store.parts)] / "slab" / f"{self.segment:08x}.slab"


def index_of(part: Path) -> dict[bytes, bytes]:
    """All records of a directory that nobody has open."""
    with lmdb.open(str(part / "index"), readonly=True, lock=False, create=False) as env, env.begin() as txn:
        return {bytes(key): bytes(raw) for key, raw in txn.cursor()}


def name_in(records: dict[bytes, bytes], written: bytes) -> bytes:
    """A block's full name. From format 3 on an index writes 6 bytes of its namespace's digest."""
    if int.from_bytes(records[b"mformat"], "little") < 3:
        return written
    (namespace,) = (key[10:] for key in records if key.startswith(b"mnamespace" + written[:6]))
    return namespace + written[6:]


def test_the_directory_is_as_the_format_says(store: Store) -> None:
    """Every entry's slot holds its block and zeros after it; the line to leave names the same blocks."""
    records = index_of(store.parts[0])
    written = {key[1:]: raw for key, raw in records.items() if key.startswith(b"b")}
    names = {each: name_in(records, each) for each in written}
    entries = {name: Entry.of(name, written[each]) for each, name in names.items()}
    for name, entry in entries.items():
        with entry.file(store).open("rb") as file:
            file.seek(entry.slot * entry.slot_bytes)
            raw = file.read(entry.slot_bytes)
        assert raw == payload_of(name[32:], entry.length).ljust(entry.slot_bytes, b"\0")
        assert entry.digest == xxhash.xxh3_128_digest(raw[: entry.length])
    line = {raw for key, raw in records.items() if key.startswith(b"o")}
    assert line == set(written)
    assert not [key for key in records if key.startswith(b"r")], "a reservation of a writer that has ended"
    markers = [json.loads((part / "STORE.json").read_text()) for part in store.parts]
    assert [(one["kind"], one["format"], one["part"], one["parts"]) for one in markers] == [
        ("kvtier-g3", 1, number, len(markers)) for number in range(len(markers))
    ]
    assert {one["uuid"] for one in markers} == {records[b"muuid"].hex()}


ADDED: set[bytes] = set()
"""Records that later releases write besides, within the format: earlier ones neither read nor miss them."""


def as_ever(key: bytes, record: bytes) -> bytes:
    """A purge's mark without its fraction, by which later releases tell how the log stands to it; earlier ones round it
    off."""
    if not key.startswith(b"mpurged"):
        return record
    (mark,) = struct.unpack("<d", record)
    return struct.pack("<d", math.floor(mark) if mark >= 2.0**41 else mark)


def test_this_release_writes_the_same_bytes(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    """The same script under the same clock: same names of blocks, same objects, same records.

    Left out is what is random (the store's id, the names of replicas), what is this machine's (boot, inodes in ETags)
    and what is a matter of timing (serials, slots and ticks of G3, the order in which deltas name units; the scores of
    the policy, which hang on the C library's `exp`).
    """
    then = copied(unpacked(NEWEST.stem), tmp_path / "then", NEWEST.stem)
    now = Store(tmp_path / "now", json.loads(json.dumps(write(tmp_path / "now"))))
    assert now.manifest == then.manifest
    objects, lately = bucket_of(then), bucket_of(now)
    assert objects.keys() == lately.keys()
    for name, there in objects.items():
        assert lately[name] == there, f"{name} is written in another way"
    records, today = records_of(then), records_of(now)
    assert records.keys() == today.keys() - ADDED
    for key, record in records.items():
        assert as_ever(key, today[key]) == as_ever(key, record), f"{key!r} is written in another way"


def bucket_of(store: Store) -> dict[str, Any]:
    """Objects by name: bytes and last use; of a delta, without its replica's name, what it tells of each unit."""
    out: dict[str, Any] = {}
    for path in sorted((store.folder / "g4").rglob("*")):
        if path.is_file():
            name, raw = path.relative_to(store.folder / "g4").as_posix(), path.read_bytes()
            if "/catalogue/" in name:
                continue  # deltas merged by whoever came first
            if "/delta/" in name:
                stamp = name.rpartition("/")[2].partition("-")[0]  # one more, without units, may come at any time
                out.setdefault(f"deltas of second {int(stamp, 16) // 10**6}", []).extend(delta(raw))
            else:
                out[name] = (raw, path.stat().st_mtime_ns)
    return {name: sorted(it) if isinstance(it, list) else it for name, it in out.items()}


def delta(raw: bytes) -> Iterator[tuple[Any, ...]]:
    """Of each unit what every version tells: scope, depth, hashes as far as they are there, last use. Behind it, key id
    and tag of everything before."""
    magic, version, contexts, count = struct.unpack_from("<8sHHI", raw)
    assert magic == b"KVTDELTA" and raw[-24:-16] == bytes(8)
    place = yield from (delta_2(raw, count) if version == 2 else delta_3(raw, contexts, count))
    assert place == len(raw) - 24


def delta_2(raw: bytes, count: int) -> Generator[tuple[Any, ...], None, int]:
    """After magic, version, zero and count: header length u32, ETag length u16, last use f64, header without its zero
    end, ETag."""
    place = 16
    for _ in range(count):
        length, etag, used = struct.unpack_from("<IHd", raw, place)
        header = raw[place + 14 : place + 14 + length]
        blocks, depth = struct.unpack_from("<HI", header, 10)
        hashes = [header[208 + 72 * index :][:32] for index in range(blocks)]
        yield header[64:80], depth, hashes[-1], b"".join(each[:4] for each in hashes[:-1]), used
        place += 14 + length + etag
    return place


def delta_3(raw: bytes, contexts: int, count: int) -> Generator[tuple[Any, ...], None, int]:
    """After magic, version and counts: contexts, scope (16), position u64, ttl u32, max age u32; units, context u16,
    blocks u16, depth u32, KiB u32, stamp f64, last use f64, hash of the last block, 4 bytes of each other's."""
    place = 16 + 32 * contexts
    for _ in range(count):
        context, blocks, depth, _kib, _born, used, last = struct.unpack_from("<HHIIdd32s", raw, place)
        prints = raw[place + 60 : place + 60 + 4 * (blocks - 1)]
        yield raw[16 + 32 * context :][:16], depth, last, prints, used
        place += 60 + len(prints)
    return place


def records_of(store: Store) -> dict[bytes, Any]:
    """Records of the index by key, each as far as two runs of one release agree about it."""
    out: dict[bytes, Any] = {}
    records = index_of(store.parts[0])
    for key, raw in records.items():
        if key.startswith(b"b"):
            out[key] = Entry.of(name_in(records, key[1:]), raw).told
        elif key.startswith(b"mnote") and key.endswith(b"policy"):
            out[key] = (raw[:16], len(raw))
        elif key.startswith(b"mnote") and key.endswith(b"clock"):
            out[key] = (raw[:24], len(raw))  # magic and both times; the boot follows
        elif key[1:] == b"counters":
            _serial, _tick, blocks, size, _segments = struct.unpack("<QQQQI", raw)
            out[key] = (blocks, size)
        elif key in (b"muuid", b"mbudget", b"pbudget"):
            out[key] = len(raw)
        elif key.startswith(b"m"):
            out[key] = raw
        else:
            assert (key[:1], len(key)) in {(b"o", 25), (b"r", 9), (b"f", 13), (b"s", 5), (b"v", 5), (b"c", 5)}
            if key.startswith(b"s"):
                out[key] = struct.unpack("<HIIII", raw)[:3]  # path, class, slots
    return out
