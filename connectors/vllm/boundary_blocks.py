"""Blocks of sliding windows and states: which of them a request can be resumed with, and held until they are copied.

The engine takes such a block back as soon as no later token reads it, mostly in the step after the one that filled it.
So a boundary's blocks are *held* when the step that reaches it is planned:

    step planned     → `cover`: holds the boundaries that the step crosses: the prompt's last one, those asked for by
                       `want`, and one far from the last that was held; of a decoding request, the blocks that the
                       engine will take back before the next one
    request ended    → `finish`: holds the last boundary that it reached
    step completed   → `complete`: boundaries whose tokens are trusted (`Track.trusted`) are ready; others are given up
    copied, or given up → the blocks are given back

Where the pool is short nothing is held: the boundary's blocks are *watched*, as are those of a request that is over
before they are copied, and all once the engine has no block for a request that runs. The engine may hand them out at
any time, and the boundary is lost then.

A state is what a step leaves at its end: in the block of its last token, which a later step overwrites unless that
token is the block's last. So with states, only a boundary at which a step ends can be held, and one at which the engine
has given the step a block for a checkpoint.

A request that begins behind blocks of the engine's pool is trusted with them only if they are known to be right:
computed by a request whose tokens were trusted, and still under the name that they had then. Where steps are planned
ahead, the step that fills them may be under way: they are known by the end of the request's own first step, or never.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from kvtier.connectors.vllm.boundary import Boundary, Found, Left, Tables
from kvtier.connectors.vllm.compat import EnginePool
from kvtier.connectors.vllm.confirm import Chain, Track
from kvtier.connectors.vllm.groups import Groups
from kvtier.identity.groups import Kind, boundary_keys
from kvtier.retention.ranges import uniform

_HELD_FRACTION = 4
"""At most one in so many of the pool's blocks is held."""
_FAR = 4
"""Blocks of the full group between boundaries that are held for their distance alone, per block of theirs: so these
come to at most a quarter of the full group's bytes."""
_ENDED = 3
"""As many boundaries are remembered: a step leaves states at two at most, and one is planned ahead of what is known."""
_TAILS = 8
"""As many boundaries of a decoding request are waited for: two steps of drafts, planned ahead, cross fewer."""
_SHORT_FRACTION = 16
"""With fewer free than one in so many, nothing is held."""


class BoundaryBlocks:
    """See the module. Owns the references that it took in the engine's pool."""

    def __init__(self, groups: Groups, pool: EnginePool) -> None:
        self.ready: list[Boundary] = []  # for the caller to copy, who takes them out
        self.given_up = 0  # blocks of boundaries that were not stored
        self.lost = 0  # of these, right ones that the engine has taken back, or may at any time
        self.count = 0  # blocks held
        self._groups, self._size = groups, groups.block_tokens
        self._pool = pool
        self._requests: dict[str, Tables] = {}
        self._pending: list[Boundary] = []
        self._holding: set[Boundary] = set()
        self._left: list[Left] = []
        self._known: dict[tuple[int, int], object] = {}  # by group and block: the name under which it is right
        self._watched: dict[int, list[Boundary]] = {}  # by block: those that are lost when it is handed out
        self._on_reuse = self._reused  # one object: it is compared

    def __bool__(self) -> bool:
        return bool(self._pending or self.ready)

    # ── tables ──────────────────────────────────────────────────────────────────────────────────────────────

    def place(self, track: Track, tables: Sequence[Sequence[int]]) -> None:
        """The engine gave the request these whole tables, in the order of `Groups.beside`."""
        known = self._of(track)
        if known is None:
            known = self._requests[track.name] = Tables(track, track.life, [])
        known.tables = [list(table) for table in tables]

    def extend(self, track: Track, tables: Sequence[Sequence[int]]) -> None:
        """The engine appended blocks to the request's tables."""
        known = self._of(track)
        if known is not None:
            for table, new in zip(known.tables, tables, strict=True):
                table.extend(new)

    def _of(self, track: Track) -> Tables | None:
        """The request's tables, if they are of this life."""
        known = self._requests.get(track.name)
        if known is not None and (known.track is not track or known.life != track.life):
            self.drop(track.name)
            return None
        return known

    def drop(self, name: str) -> None:
        """The engine took the request's blocks, or it is over."""
        known = self._requests.pop(name, None)
        if known is not None:
            self._release_tails(known)

    def rename(self, track: Track) -> None:
        """The engine took back tokens of the request, and goes on with others: blocks that were confirmed with them are
        not any more."""
        known = self._of(track)
        if known is not None:
            known.noted = min(known.noted, track.confirmed)

    def lose(self) -> None:
        """What the engine planned was not followed to its end: no table is known until the engine gives all of it."""
        for name in list(self._requests):
            self.drop(name)

    def want(self, track: Track, tokens: int) -> None:
        """Hold the boundary after so many tokens, when a step crosses it: other prompts branch off there."""
        known = self._of(track)
        if known is not None:
            known.wanted.add(tokens)

    # ── holding ─────────────────────────────────────────────────────────────────────────────────────────────

    def cover(self, step: int, track: Track, begin: int, end: int) -> None:
        """The step that is being planned computes tokens begin … end-1 of a request."""
        known = self._of(track)
        if known is None or end <= begin:
            return
        if known.begin < 0:
            self._begin(known, begin, step)
        if end // self._size == begin // self._size:
            return
        prompt, last = track.request.num_prompt_tokens, end // self._size * self._size
        if not self._groups.drafts or end <= prompt:  # drafts leave a state each, and one of them goes on
            known.ended = (*known.ended, *self._left_by(known, begin, end))[-_ENDED:]
        wanted = {*self._ends(prompt), *known.wanted}
        far = _FAR * self._size * sum(self._groups.counts(last))
        if last - max([known.begin, *known.taken[-1:]]) >= far:
            wanted.add(last)
        for tokens in sorted(
            boundary for boundary in wanted if begin < boundary <= end and self._whole(known, boundary)
        ):
            self._hold(known, tokens, step, ())
            known.wanted.discard(tokens)
        crossed = range(last, max(prompt - 1, begin, last - _TAILS * self._size), -self._size)
        for tokens in reversed(crossed if not self._short() else ()):
            if tokens not in known.tails and self._whole(known, tokens):
                self._hold_tail(known, tokens)

    def _ends(self, prompt: int) -> Iterator[int]:
        """The last boundary before a prompt's last token. Of states, of which answers with drafts leave none: also that
        behind this token, and that at which the engine ends a step where its own hits leave out a block."""
        yield (prompt - 1) // self._size * self._size
        if self._groups.states and self._groups.drafts:
            yield prompt // self._size * self._size
            yield (prompt // self._size - self._groups.drops) * self._size

    def _left_by(self, known: Tables, begin: int, end: int) -> Iterator[int]:
        """Boundaries at which a step leaves its states. In its middle it does at the last one, where vLLM has a block
        for that in every table; the running state, which needs one too, lies in an earlier block."""
        inside = (end - 1) // self._size * self._size
        if self._groups.checkpoints and not begin % self._size and begin < inside:
            places = [place for place, one in enumerate(self._groups.beside) if one.group.kind is Kind.STATE]
            depth = inside // self._size - 1
            if all(depth < len(known.tables[place]) and known.tables[place][depth] for place in places):
                yield inside
        if end % self._size == 0:
            yield end

    def _whole(self, known: Tables, tokens: int) -> bool:
        """Whether the last step that reached the boundary left all that it needs: states, only where it ended."""
        return not self._groups.states or tokens in known.ended

    def _begin(self, known: Tables, begin: int, step: int) -> None:
        """The request goes on after `begin` tokens, which were found in the pool, or loaded."""
        track, loaded = known.track, known.track.loaded
        first = (track.load_begin if loaded >= begin else begin) // self._size
        known.begin, known.began, known.noted = begin, step, first
        known.proved = begin % self._size == 0
        if not known.proved:
            return
        found = [
            (group, block := known.tables[place][depth], self._name(group, block, track.chain, depth))
            for place, (group, depths) in enumerate(self._needed(begin))
            for depth in depths
            if depth < first
        ]
        known.proved = all(name is not None for _, _, name in found)
        known.behind = [one for one in found if not self._right(one)] if known.proved else []

    def _name(self, group: int, block: int, chain: Chain, depth: int) -> object | None:
        return self._pool.named(block, chain[depth], group) if depth < len(chain) else None

    def _right(self, found: Found) -> bool:
        group, block, name = found
        return self._known.get((group, block)) is name

    def _prove(self, known: Tables, step: int) -> None:
        """What was found at the request's begin is known to be right now, or, once its first step is over, is not."""
        known.behind = [one for one in known.behind if not self._right(one)]
        if known.behind and known.began <= step:
            known.proved, known.behind = False, []

    def _needed(self, tokens: int) -> Iterable[tuple[int, range]]:
        """The engine's number of each group, and the depths of the blocks that it needs."""
        numbers = (one.number for one in self._groups.beside)
        return zip(numbers, self._groups.needed(tokens), strict=True)

    def _hold(self, known: Tables, tokens: int, step: int, tail: Collection[int]) -> bool:
        """Hold a boundary, if it can be, or watch it, where there is no room. `tail`: blocks of it that are held
        already, and whose references it takes over."""
        track = known.track
        if not self._storable(track, tokens):
            return False
        needed = [depths for _, depths in self._needed(tokens)]
        first = min((depths.start for depths in needed), default=tokens // self._size)
        blocks = [
            block
            for table, depths in zip(known.tables, needed, strict=True)
            for block in table[depths.start : depths.stop]
        ]
        complete = len(blocks) == sum(map(len, needed)) and 0 not in blocks
        beyond = first * self._size >= known.begin and not self._groups.states  # a state is made of all before it
        proved = known.proved or beyond
        if not (complete and proved and blocks):
            self.given_up += len(blocks)
            self.lost += len(blocks) if proved and tokens not in known.missed else 0
            known.missed.add(tokens)
            return False
        self._pool.hold(block for block in blocks if block not in tail)
        self.count += len(blocks) - len(tail)
        places = [place for place, depths in enumerate(needed) for _ in depths]
        nameless = Chain((), track.chain.terms)
        behind = [] if beyond else known.behind
        boundary = Boundary(track, track.life, tokens, nameless, blocks, places, step, behind)
        self._pending.append(boundary)
        self._holding.add(boundary)
        if self.count > self._pool.blocks // _HELD_FRACTION or self._short():
            self.watch(boundary)
        known.taken.append(tokens)
        return True

    def _storable(self, track: Track, tokens: int) -> bool:
        return track.storable and tokens // self._size <= track.storable_blocks

    def _names(self, track: Track, tokens: int) -> Chain:
        """The names of a boundary's blocks, with the terms of the full group's last one."""
        depth = tokens // self._size
        _, _, block_terms = next(iter(track.chain.terms.spans(depth - 1, depth)))
        return Chain(boundary_keys(track.chain[depth - 1], self._groups.counts(tokens)), uniform(block_terms.terms))

    def _hold_tail(self, known: Tables, tokens: int) -> None:
        """Hold those blocks of a boundary that the engine takes back before the next one: where the request ends before
        that, they complete it. A step that is planned ahead crosses the next one before the request is known to have
        ended, and its drafts may be refused, so they are given back when the block before that one is confirmed."""
        if not self._storable(known.track, tokens):
            return
        tail: list[int] = []
        later = self._groups.needed(tokens + self._size - 1 + self._groups.drafts)
        for table, depths, kept in zip(known.tables, self._groups.needed(tokens), later, strict=True):
            tail += table[depths.start : min(kept.start, depths.stop)]
        if 0 in tail or self.count + len(tail) > self._pool.blocks // _HELD_FRACTION:
            return
        self._pool.hold(tail)
        self.count += len(tail)
        known.tails[tokens] = tail
        self._release_tails(known, sorted(known.tails)[-_TAILS:][0])

    def _release_tails(self, known: Tables, below: int = 1 << 62) -> None:
        """Give back the tails of boundaries before the one after `below` tokens."""
        for tokens in [tokens for tokens in known.tails if tokens < below]:
            tail = known.tails.pop(tokens)
            self._pool.give_back(tail)
            self.count -= len(tail)

    def _short(self) -> bool:
        return self._pool.free() * _SHORT_FRACTION < self._pool.blocks

    def finish(self, track: Track, computed: int, tables: Sequence[Sequence[int]], step: int) -> None:
        """The request is over, with KV of `computed` tokens in these tables, which the engine is about to take back."""
        known = self._of(track)
        if known is None:
            return
        depth, full = computed // self._size, self._groups.full
        while depth and track.drafts and self._name(full, track.table[depth - 1], track.chain, depth - 1) is None:
            depth -= 1  # drafts of the last step filled the block: it has no name any more, and is not stored
        tokens = depth * self._size
        fresh = tokens > known.begin >= 0 and tokens not in known.taken and self._whole(known, tokens)
        tail = known.tails.get(tokens, ())
        if fresh and self._still(known, tokens, tables) and self._hold(known, tokens, step, tail):
            known.tails.pop(tokens, None)  # the boundary's now
        sound = (known.proved and not known.behind) or not self._groups.states
        if sound and (names := list(self._named(known, computed // self._size))):
            self._left.append(Left(track, track.life, step, names))
        self.drop(track.name)

    def _still(self, known: Tables, tokens: int, tables: Sequence[Sequence[int]]) -> bool:
        """Whether all blocks of a boundary are the request's yet, or held."""
        tail = known.tails.get(tokens, ())
        return all(
            block in tail or (depth < len(now) and now[depth] == block)
            for table, now, (_, depths) in zip(known.tables, tables, self._needed(tokens), strict=True)
            for depth, block in zip(depths, table[depths.start : depths.stop], strict=False)
        )

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, step: int) -> None:
        """Everything up to `step` has run: `trusted` of every track is as it left it."""
        self._note_left(step)
        for known in self._requests.values():  # each after those that it may have found blocks of
            if known.behind:
                self._prove(known, step)
            if known.life == known.track.life and known.track.confirmed > known.noted and not known.behind:
                self._note(known)
            if known.tails:
                self._release_tails(known, known.track.confirmed * self._size)
        waiting = []
        for boundary in self._pending:
            track = boundary.track
            boundary.behind = [one for one in boundary.behind if not self._right(one)]
            if boundary.behind and boundary.step > step:
                waiting.append(boundary)
            elif boundary.behind:
                self.given_up += len(boundary.blocks)
                self.give_back(boundary)
            elif track.life == boundary.life and track.trusted >= boundary.tokens <= len(track.chain) * self._size:
                boundary.chain = self._names(track, boundary.tokens)
                self.ready.append(boundary)
            elif (
                track.life != boundary.life
                or not self._storable(track, boundary.tokens)
                or (
                    boundary.step <= step
                    and not (track.drafts and self.running(boundary))  # else later drafts reach it
                )
            ):
                self.given_up += len(boundary.blocks)
                self.give_back(boundary)
            else:
                waiting.append(boundary)
        self._pending = waiting

    def _note(self, known: Tables) -> None:
        """Blocks of the request were confirmed: those of the other groups at these depths are right, too; but no state
        that was made of one that is not."""
        if known.proved or not self._groups.states:
            for _, group, block, name in self._named(known, known.track.confirmed):
                self._known[group, block] = name
        known.noted = known.track.confirmed

    def _note_left(self, step: int) -> None:
        """The same of requests that are over. Their blocks may have been handed out: under other names."""
        for left in self._left:
            confirmed = left.track.confirmed if left.track.life == left.life else 0
            self._known.update({(group, block): name for depth, group, block, name in left.names if depth < confirmed})
        self._left = [left for left in self._left if left.step > step]

    def _named(self, known: Tables, stop: int) -> Iterator[tuple[int, int, int, object]]:
        """Depth, group, block and name of the request's blocks up to depth `stop` that were not noted yet."""
        chain = known.track.chain
        for place, one in enumerate(self._groups.beside):
            table = known.tables[place]
            for depth in range(known.noted, min(stop, len(table), len(chain))):
                block = table[depth]
                name = self._pool.named(block, chain[depth], one.number) if block else None
                if name is not None:
                    yield depth, one.number, block, name

    def watch(self, boundary: Boundary) -> None:
        """The engine may have the blocks where it needs them, and the boundary is lost then."""
        if not boundary.held:
            return
        self._let_go(boundary)
        for block in boundary.blocks:
            self._watched.setdefault(block, []).append(boundary)
        self._pool.watch(boundary.blocks, self._on_reuse)

    def _reused(self, block: Any) -> None:
        for boundary in self._watched.pop(block.block_id, ()):
            boundary.lost = True

    def lasting(self, boundary: Boundary) -> bool:
        """Whether no block of it was handed out since it was filled. A block that somebody else watches now may have
        been."""
        return not boundary.lost and (boundary.held or self._pool.watched(boundary.blocks, self._on_reuse))

    def running(self, boundary: Boundary) -> bool:
        """Whether its request goes on."""
        known = self._requests.get(boundary.track.name)
        return known is not None and known.track is boundary.track

    def give_back(self, boundary: Boundary) -> None:
        """It is copied, or will not be. Idempotent."""
        for block in boundary.blocks if self._watched else ():
            watching = self._watched.get(block, [])
            if boundary in watching:
                watching.remove(boundary)
        if boundary.held:
            self._let_go(boundary)
            self._pool.give_back(boundary.blocks)

    def _let_go(self, boundary: Boundary) -> None:
        boundary.held = False
        self._holding.discard(boundary)
        self.count -= len(boundary.blocks)

    def forget(self, purged: Callable[[Chain], bool]) -> None:
        """Nothing is kept of what waits for its copy under chains that are purged, nor of requests that are over."""
        gone = [one for one in self.ready if purged(one.chain)]
        gone += [one for one in self._pending if not self.running(one) and purged(one.track.chain)]
        self.ready = [one for one in self.ready if one not in gone]
        self._pending = [one for one in self._pending if one not in gone]
        for boundary in gone:
            self.give_back(boundary)

    def watch_all(self) -> None:
        """Nothing is held any more, as when the engine is about to reset its pool, which it cannot while blocks are."""
        for known in self._requests.values():
            self._release_tails(known)
        for boundary in list(self._holding):
            self.watch(boundary)

    def free(self) -> bool:
        """The engine needs blocks: watch what is held instead. Returns whether more are free now."""
        before = self._pool.free()
        self.watch_all()
        return self._pool.free() > before

    def clear(self) -> None:
        """Nothing that was computed until now counts."""
        for boundary in (*self._pending, *self.ready):
            self.give_back(boundary)
        self._pending, self.ready, self._left = [], [], []
        self._known.clear()
        self.lose()

    def check(self) -> None:
        """Assert that what is held is what is owned."""
        tails = sum(len(tail) for known in self._requests.values() for tail in known.tails.values())
        assert self.count == tails + sum(len(boundary.blocks) for boundary in self._holding), "the held are miscounted"
