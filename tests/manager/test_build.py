"""The four tiers as a user configures them: a real arena, a real disk, a real directory of objects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.testing import payload_of, payloads_of, sample_namespace

BLOCK = 64 * 1024
NS = sample_namespace(BLOCK)


def config(root: Path, g2: str = "4MiB", g3: str = "32MiB", **g4: object) -> kvtier.Config:
    tiers = {
        "g2": {"capacity": g2},
        "g3": {"path": str(root / "g3"), "capacity": g3},
        "g4": {"url": f"file://{root}/g4", "stride": 8, **g4},
    }
    return kvtier.Config.parse({"version": 1, "tiers": tiers})


def expect(cache: kvtier.Cache, keys: list[bytes], tiers: set[str]) -> None:
    with cache.get(keys) as hit:
        assert set(hit.tiers) == tiers
        assert [bytes(b) for b in hit.blocks] == [payload_of(key, BLOCK) for key in keys]


def test_a_prompt_four_times_g2_comes_back_from_disk_and_objects(tmp_path: Path) -> None:
    keys = kvtier.chain_hashes(range(256 * 16), NS)
    with kvtier.open(config(tmp_path), NS) as cache:
        assert cache.put(keys, payloads_of(keys, BLOCK)) == 256
        assert cache.flush() == kvtier.Flushed(durable={"g3": 256, "g4": 256}, dropped=0, pending=0)
        assert cache.match(keys) == 256
        cache.evict("g2")
        expect(cache, keys[:32], {"g3"})
        cache.evict("g2")
        cache.evict("g3")
        expect(cache, keys[:32], {"g4"})
        stats = cache.stats()
        assert stats["g3"]["bytes"] <= stats["g3"]["capacity_bytes"] == 32 << 20
        cache.check()


def test_another_process_finds_it(tmp_path: Path) -> None:
    """Put in a child that exits without closing anything but its cache; served here from G3, then from G4."""
    keys = kvtier.chain_hashes(range(40 * 16), NS)
    script = (
        "import sys, kvtier; from kvtier.testing import payloads_of, sample_namespace\n"
        f"ns = sample_namespace({BLOCK}); keys = kvtier.chain_hashes(range(640), ns)\n"
        "cfg = kvtier.Config.load(sys.argv[1])\n"
        f"with kvtier.open(cfg, ns) as cache: assert cache.put(keys, payloads_of(keys, {BLOCK})) == 40\n"
    )
    path = tmp_path / "kvtier.yaml"
    path.write_text(
        f"tiers: {{g2: {{capacity: 4MiB}}, g3: {{path: {tmp_path}/g3, capacity: 32MiB}}, "
        f"g4: {{url: 'file://{tmp_path}/g4', stride: 8}}}}\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
    with kvtier.open(kvtier.Config.load(path), NS) as cache:
        assert cache.match(keys) == 40
        expect(cache, keys, {"g3"})
        cache.evict("g2")
        cache.evict("g3")
        expect(cache, keys, {"g4"})


def test_other_weights_at_the_same_place_miss(tmp_path: Path) -> None:
    keys = kvtier.chain_hashes(range(640), NS)
    with kvtier.open(config(tmp_path), NS) as cache:
        cache.put(keys, payloads_of(keys, BLOCK))
    retrained = sample_namespace(BLOCK, weights="test:2")
    with kvtier.open(config(tmp_path), retrained) as cache:
        assert cache.match(keys) == 0, "the old names were found in the new namespace"
        assert cache.match(kvtier.chain_hashes(range(640), retrained)) == 0
    with kvtier.open(config(tmp_path), NS) as cache:
        assert cache.match(keys) == 40


def test_missing_and_unwritable_directories_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kvtier.open(config(tmp_path / "not" / "there"), NS) as cache:  # a volume that is not mounted stops no engine
        keys = kvtier.chain_hashes(range(640), NS)
        cache.put(keys, payloads_of(keys, BLOCK))
        assert cache.match(keys) == 40
    assert f"g3 is left out: g3: open: {tmp_path}/not/there/g3: No such file or directory" in caplog.text
    (tmp_path / "g3").write_text("a file is in the way")
    with pytest.raises(kvtier.ConfigError, match=r"tiers\.g3\.path"):
        kvtier.open(config(tmp_path), NS)


def test_a_disk_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(kvtier.ConfigError, match=r"tiers\.g3\.capacity"):
        kvtier.open(config(tmp_path, g3="1KiB"), NS)


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    with kvtier.open(config(tmp_path), NS) as cache:
        keys = kvtier.chain_hashes(range(640), NS)
        cache.put(keys, payloads_of(keys, BLOCK))
    other = tmp_path / "other"
    other.mkdir()
    with kvtier.open(config(other), NS):
        pass
    slabs = [p for p in (tmp_path / "g3").rglob("*") if p.is_file()]
    before = {p: p.stat().st_size for p in slabs}
    for index in (p for p in (other / "g3").rglob("*") if p.is_file()):
        if "mdb" in index.name:  # the index of one store with the segments of another
            target = next(p for p in slabs if p.name == index.name)
            target.write_bytes(index.read_bytes())
            before[target] = target.stat().st_size
    with pytest.raises(kvtier.FormatError):
        kvtier.open(config(tmp_path), NS)
    assert {p: p.stat().st_size for p in slabs} == before, "a foreign store was touched"


def test_an_unreachable_bucket_costs_misses_only(tmp_path: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k" * 16, "secret": "s" * 16}
    cfg = kvtier.Config.parse(
        {
            "tiers": {"g2": {"capacity": "4MiB"}, "g4": {"url": "s3://bucket/prefix", "options": options}},
            "deadlines": {"lookup": "200ms", "get": "1s", "put": "1s", "flush": "1s", "close": "1s"},
        }
    )
    keys = kvtier.chain_hashes(range(320), NS)
    with kvtier.open(cfg, NS) as cache:
        assert cache.put(keys, payloads_of(keys, BLOCK)) == 20
        assert cache.match(keys) == 20
        cache.evict("g2")
        assert cache.match(keys) == 0
        with cache.get(keys) as hit:
            assert len(hit) == 0
        assert "s" * 16 not in str(cache.stats()) + repr(cache.config)


@pytest.mark.parametrize(
    ("g4", "message"),
    [({"url": "nonsense"}, r"tiers\.g4\.url"), ({"url": "wat://bucket/x"}, r"tiers\.g4\.url")],
)
def test_a_url_that_cannot_be_is_refused(tmp_path: Path, g4: dict[str, str], message: str) -> None:
    with pytest.raises(kvtier.ConfigError, match=message):
        kvtier.open(kvtier.Config.parse({"tiers": {"g4": g4}}), NS)


def test_a_forked_child_cannot_hurt(tmp_path: Path) -> None:
    keys = kvtier.chain_hashes(range(640), NS)
    with kvtier.open(config(tmp_path), NS) as cache:
        cache.put(keys, payloads_of(keys, BLOCK))
        cache.flush()
        child = os.fork()
        if child == 0:
            try:
                cache.get(keys)
            except kvtier.ClosedError:
                cache.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        cache.evict("g2")
        expect(cache, keys, {"g3"})
