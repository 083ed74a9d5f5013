from __future__ import annotations

from kvtier.tiers.disk.ghosts import GHOSTS_MAX, Ghosts


def names(count: int) -> list[bytes]:
    return [number.to_bytes(80, "big") for number in range(count)]


def test_a_block_that_returns_is_known_once() -> None:
    ghosts = Ghosts()
    for mark, name in enumerate(names(50)):
        ghosts.add(name, 1, 1000, mark)
    known = {mark: ghosts.take(name, 1, 1000) for mark, name in enumerate(names(50))}
    assert all(found in ((mark, 1), None) for mark, found in known.items())
    assert sum(found is not None for found in known.values()) >= 45
    assert all(ghosts.take(name, 1, 1000) is None for name in names(100))
    assert ghosts.take(names(1)[0], 2, 1000) is None, "of another class"


def test_a_sample_stands_for_a_large_class() -> None:
    ghosts, blocks = Ghosts(), 8 * GHOSTS_MAX
    some = names(40_000)
    for name in some:
        ghosts.add(name, 1, blocks, 0)
    stands_for = sum(found[1] for name in some if (found := ghosts.take(name, 1, blocks)) is not None)
    assert 0.8 * len(some) <= stands_for <= 1.1 * len(some)
