"""The damages that `benchmarks/peers` does to stores, and how it judges what a store does then."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvtier.testing.child import Child

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
SIZE = 16_384

STORE = """
import os, sys, time
from pathlib import Path
from serve import prompt, serve

class Plain:
    def __init__(self, folder, terms):
        self.folder, self.terms = Path(folder), terms

    def put(self, blocks, payloads):
        for block, payload in zip(blocks, payloads):
            (self.folder / str(block)).write_bytes(payload)
        return len(blocks)

    def get(self, blocks, size):
        if (self.folder / "asleep").exists():
            time.sleep(60)
        if (self.folder / "ill").exists():
            os._exit(1)
        found = [(self.folder / str(block)) for block in blocks]
        return [file.read_bytes()[:size] if file.exists() else None for file in found]

    def close(self):
        pass

serve(Plain, lambda: {"plain": "1"})
"""


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    kept = list(sys.path)
    sys.path.insert(0, str(PEERS))
    try:
        return _load("faults")
    finally:
        sys.path[:] = kept


@pytest.fixture
def row(faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A row of a store that believes its files."""
    contenders = sys.modules["contenders"]
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "plain_store.py").write_text(STORE)
    (tmp_path / "serve.py").write_text((PEERS / "serve.py").read_text())
    monkeypatch.setattr(contenders, "HERE", tmp_path)
    plain = contenders.Contender("plain", "plain", "a file per block")
    return faults.Row(plain, Path(sys.executable), tmp_path / "row")


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        ("control", "right"), ("flip", "wrong"), ("stale version", "right"), ("duplicate", "wrong"),
        ("weights", "wrong"), ("purge", "-"),
    ],
)  # fmt: skip
def test_a_store_that_believes_its_files_is_told(faults: ModuleType, row: object, damage: str, outcome: str) -> None:
    assert faults.DAMAGES[damage](row) == outcome
    row.kill()  # type: ignore[attr-defined]


def test_a_block_of_two_versions_is_wrong(faults: ModuleType, row: object) -> None:
    row.open()  # type: ignore[attr-defined]
    row.fill(generation=1)  # type: ignore[attr-defined]
    assert row.get(generation=1, older=[0]) == "right"  # type: ignore[attr-defined]
    place = row.places(1)[3]  # type: ignore[attr-defined]
    old, new = (faults.payload(3, generation, faults.BLOCK) for generation in (0, 1))
    place.replace(old[:4096] + new[4096:])
    assert row.get(generation=1, older=[0]) == "wrong"  # type: ignore[attr-defined]
    place.replace(old)
    assert row.get(generation=1, older=[0]) == "right" and row.get(generation=1) == "wrong"  # type: ignore[attr-defined]
    row.kill()  # type: ignore[attr-defined]


def test_who_hangs_and_who_dies_is_told(faults: ModuleType, row: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    for word, outcome in (("asleep", "hang"), ("ill", "dead")):
        row.open()  # type: ignore[attr-defined]
        row.put()  # type: ignore[attr-defined]
        (row.folder / "store" / word).touch()  # type: ignore[attr-defined]
        with pytest.raises(faults.Ended, match=outcome):
            row.get()  # type: ignore[attr-defined]
        (row.folder / "store" / word).unlink()  # type: ignore[attr-defined]
    row.kill()  # type: ignore[attr-defined]


def _stored(faults: ModuleType, folder: Path, shared: bool) -> tuple[list[object], Callable[[], list[bytes]]]:
    """Eight blocks, in one file or in eight, and what each place holds now."""
    blocks = [faults.payload(number, 0, SIZE) for number in range(8)]
    if shared:
        (folder / "slab").write_bytes(bytes(4096) + b"".join(blocks))
    else:
        for number, block in enumerate(blocks):
            (folder / str(number)).write_bytes(block)
    places = faults.places_of(folder, blocks)
    whole = {place.file for place in places}
    assert len(whole) == (1 if shared else 8) and all(place.alone != shared for place in places)

    def now() -> list[bytes]:
        return [place.file.read_bytes()[place.offset : place.offset + SIZE] for place in places]

    assert now() == blocks
    return places, now


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("damage", ["flip", "zero page", "swap", "misdirect"])
def test_a_damage_hits_every_other_block_and_no_neighbour(
    faults: ModuleType, tmp_path: Path, damage: str, shared: bool
) -> None:
    places, now = _stored(faults, tmp_path, shared)
    before = now()
    faults.BYTES[damage](places)
    same = [mine == wanted for mine, wanted in zip(now(), before, strict=True)]
    assert same == [False, True] * 4


def test_a_file_is_cut_in_a_payload_and_grown_behind_it(faults: ModuleType, tmp_path: Path) -> None:
    for shared in (False, True):
        folder = tmp_path / str(shared)
        folder.mkdir()
        places, now = _stored(faults, folder, shared)
        before = now()
        faults.BYTES["extend"](places)
        assert now() == before
        faults.BYTES["truncate"](places)
        cut = [len(mine) for mine in now()]
        assert cut == ([SIZE] * 4 + [SIZE // 2, 0, 0, 0] if shared else [SIZE // 2, SIZE] * 4)


def test_a_block_that_lies_nowhere_is_named(faults: ModuleType, tmp_path: Path) -> None:
    _stored(faults, tmp_path, shared=True)
    with pytest.raises(LookupError, match=r"\[1\] of 2"):
        faults.places_of(tmp_path, [faults.payload(0, 0, SIZE), faults.payload(9, 0, SIZE)])


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Child]]:
    """Of stores that are well, as a run of all damages keeps them."""
    kept: dict[str, Child] = {}
    yield kept
    for child in kept.values():
        child.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    "damage",
    ["control", "flip", "zero page", "truncate", "extend", "swap", "misdirect", "stale version", "duplicate", "dtype",
     "weights", "longrope", "adapter", "dummy load", "purge", "purge undone"],
)  # fmt: skip
@pytest.mark.parametrize("store", ["kvtier G3", "kvtier G4"])
def test_no_damage_of_files_is_served(
    faults: ModuleType, processes: dict[str, Child], tmp_path: Path, store: str, damage: str
) -> None:
    """Of kvtier itself: right bytes, or misses for the blocks that were damaged alone."""
    contender = next(each for each in faults.CONTENDERS if each.name == store)
    found = faults.measured(contender, damage, Path(sys.executable), tmp_path, processes)
    assert found["outcome"] in ("right", "miss") and found["blocks"]["wrong"] == 0, found
    if damage == "control":
        assert found["outcome"] == "right", found
    if damage in faults.BYTES:
        assert found["blocks"]["right"] >= 4, found
