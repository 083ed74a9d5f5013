"""Groups in a pool without an engine: a model of full attention, a window and a state goes on at a boundary as if it
had computed all of the prompt, byte by byte. Each comparison has a control that fails."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from kvtier.errors import InvalidRequest
from kvtier.identity.groups import boundary_keys
from kvtier.identity.hashing import chain_hashes
from kvtier.identity.keys import SHARED, BlockKey, make_keys
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.device.boundaries import PoolBoundaries
from kvtier.tiers.device.torch_pool import DevicePool

torch = pytest.importorskip("torch")

SIZE, WINDOW, BYTES = 4, 7, 64
"""Tokens of a block and of the window; bytes of a block: 16 of each token, 32 of a state."""
DAY = Lifetime.of(BUILTIN["24h"], 0.0)


def digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


class Model:
    """Keeps all tokens, the last six, and one state; what it says next is made of all three."""

    def __init__(self) -> None:
        self.full: list[bytes] = []
        self.window: list[bytes] = []
        self.state = bytes(32)

    def read(self, tokens: Sequence[int]) -> bytes:
        """What it says after these tokens."""
        for token in tokens:
            seen = digest(*self.full, *self.window, self.state, token.to_bytes(4, "little"))
            self.full.append(seen[:16])
            self.window = [*self.window, seen[16:]][-WINDOW + 1 :]
            self.state = digest(self.state, seen)
        return digest(*self.full, *self.window, self.state)


def counts(depth: int) -> list[int]:
    return [-(-min(depth * SIZE, WINDOW - 1) * 16 // BYTES), 1]


def row(data: bytes) -> object:
    return torch.frombuffer(bytearray(data.ljust(BYTES, b"\0")), dtype=torch.uint8)


class Library:
    """A pool, and what an owner of a model does with it."""

    def __init__(self, blocks: int = 64) -> None:
        self.pool = DevicePool(blocks, BYTES)
        self.sets = PoolBoundaries(self.pool, counts)

    def chain(self, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
        return tuple(make_keys(SHARED, chain_hashes(bytes(32), list(tokens), SIZE)))

    def ask(self, tokens: Sequence[int], ends: Sequence[int] = ()) -> tuple[bytes, int]:
        """What a model says after a prompt that is resumed where it can be, and how many tokens were not computed.
        Boundaries are kept after `ends` blocks, and after the last but one token."""
        chain, model = self.chain(tokens[:-1]), Model()
        begin = self.resume(model, chain)
        for end in sorted({*ends, len(chain)}):
            if end > begin:
                model.read(tokens[begin * SIZE : end * SIZE])
                self.keep(model, chain, end)
        done = len(model.full)
        return model.read(tokens[done:]), begin * SIZE

    def resume(self, model: Model, chain: tuple[BlockKey, ...]) -> int:
        found = self.sets.pin(chain, 1.0)
        if found is None:
            return 0
        held = [b"".join(bytes(self.pool.rows[slot].numpy()) for slot in part) for part in (found.full, *found.beside)]
        model.full = [held[0][at : at + 16] for at in range(0, found.depth * SIZE * 16, 16)]
        model.window = [held[1][at : at + 16] for at in range(0, min(found.depth * SIZE, WINDOW - 1) * 16, 16)]
        model.state = held[2][:32]
        self.sets.free(found)
        self.pool.check()
        return found.depth

    def keep(self, model: Model, chain: tuple[BlockKey, ...], depth: int) -> bool:
        known = self.pool.pin(chain[:depth], 1.0)
        new = self.pool.allocate(depth - len(known))
        for place, slot in enumerate(new, len(known)):
            self.pool.rows[slot] = row(b"".join(model.full[place * SIZE : (place + 1) * SIZE]))
        self.pool.confirm(new, chain, DAY, first=len(known))
        parts = [self.pool.allocate(count) for count in counts(depth)]
        window = b"".join(model.window)
        for place, slot in enumerate(parts[0]):
            self.pool.rows[slot] = row(window[place * BYTES : (place + 1) * BYTES])
        self.pool.rows[parts[1][0]] = row(model.state)
        kept = self.sets.confirm(parts, chain, depth, DAY, 1.0)
        self.pool.free([slot for part in parts for slot in part])
        self.pool.free([*known, *new])
        self.pool.check()
        return kept


def right(tokens: Sequence[int]) -> bytes:
    return Model().read(tokens)


TOKENS = list(range(100, 142))


@pytest.mark.parametrize("length", [4, 5, 6, 9, 21, 41, 42])
def test_a_prompt_goes_on_at_its_last_boundary(length: int) -> None:
    library, tokens = Library(), TOKENS[:length]
    assert library.ask(tokens) == (right(tokens), 0)
    assert library.ask(tokens) == (right(tokens), (length - 1) // SIZE * SIZE)


@pytest.mark.parametrize("group", ["full", "window", "state"])
def test_other_bytes_in_one_group_are_seen(group: str) -> None:
    """Control."""
    library = Library()
    library.ask(TOKENS)
    chain = library.chain(TOKENS[:-1])
    beside = boundary_keys(chain[-1], counts(len(chain)))
    slot = library.pool.match([{"full": chain[0], "window": beside[0], "state": beside[-1]}[group]], 1.0)
    library.pool.rows[slot] += 1
    answer, hit = library.ask(TOKENS)
    assert hit == 40 and answer != right(TOKENS)


def test_a_prompt_that_branches_goes_on_where_all_groups_are() -> None:
    library, one = Library(), 5
    library.ask(TOKENS, ends=[one])
    other = [*TOKENS[:30], *range(500, 512)]
    assert library.ask(other) == (right(other), one * SIZE), "the chain is known for 28 tokens"
    assert library.sets.match(library.chain(TOKENS[:30]), 1.0) == one


@pytest.mark.parametrize("lost", range(4))
def test_a_part_of_a_set_is_no_hit(lost: int) -> None:
    library = Library()
    library.ask(TOKENS, ends=[3])
    chain = library.chain(TOKENS[:-1])
    keys = [chain[4], *boundary_keys(chain[-1], counts(len(chain)))]
    library.pool.evict(keys[lost : lost + 1])
    assert library.ask(TOKENS) == (right(TOKENS), 3 * SIZE)
    assert library.ask(TOKENS)[1] == 40, "kept again"


def test_a_set_leaves_before_its_chain() -> None:
    """Whatever the pool hands out, no window and no state is left without the chain before it."""
    library = Library(blocks=24)
    library.ask(TOKENS, ends=[4])
    chain = library.chain(TOKENS[:-1])
    for _ in range(24):
        library.pool.allocate(1)
        full = len(library.pool.match(chain, 1.0))
        sets = [depth for depth in (4, 10) if library.pool.match(boundary_keys(chain[depth - 1], counts(depth)), 1.0)]
        assert all(depth <= full for depth in sets)
    assert library.pool.resident == 0


def test_a_pin_keeps_all_of_it_and_other_terms_end_it() -> None:
    library = Library(blocks=24)
    library.ask(TOKENS)
    chain = library.chain(TOKENS[:-1])
    found = library.sets.pin(chain, 1.0)
    assert found is not None and [found.depth, *map(len, found.beside)] == [10, 2, 1]
    library.pool.allocate(library.pool.free_blocks)
    assert library.sets.match(chain, 1.0) == 10
    library.sets.free(found)
    assert library.sets.match(chain, 86402.0) == 0, "their terms have ended"
    assert library.sets.evict(chain, 10) == 3 and library.sets.match(chain, 1.0) == 0
    library.pool.check()


def test_a_set_without_its_chain_or_of_another_size_is_not_kept() -> None:
    library = Library()
    chain = library.chain(TOKENS[:-1])
    parts = [library.pool.allocate(count) for count in counts(10)]
    assert not library.sets.confirm(parts, chain, 10, DAY, 1.0) and library.pool.resident == 0
    for wrong, depth in ((parts[:1], 10), ([parts[0], []], 10), (parts, 11), (parts, 0)):
        with pytest.raises(InvalidRequest, match="boundary"):
            library.sets.confirm(wrong, chain, depth, DAY, 1.0)
