"""Which of vLLM's blocks may be stored: those whose step has completed, over nothing that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.connectors.vllm.confirm import Chain, Confirmed, Confirmer, Track
from kvtier.identity.keys import BlockKey
from kvtier.retention.ranges import uniform
from kvtier.retention.terms import BUILTIN

SIZE = 4


class Pool:
    """Names of blocks as vLLM keeps them: a new object whenever a block is filled anew."""

    def __init__(self) -> None:
        self.name: dict[int, bytearray] = {}

    def fill(self, block: int, key: BlockKey) -> None:
        self.name[block] = bytearray(key)

    def tokens_of(self, blocks: Sequence[int]) -> list[object | None]:
        return [self.name.get(block) for block in blocks]

    def naming(self, tokens: Sequence[Any], keys: Sequence[BlockKey]) -> int:
        same = [token == key for token, key in zip(tokens, keys, strict=True)]
        return [*same, False].index(False)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(48, "big"))


class Engine:
    """Plans and completes steps the way vLLM's scheduler does, naming blocks when they are planned."""

    def __init__(self, caching: bool = True) -> None:
        self.pool = Pool()
        self.confirmer = Confirmer(SIZE, self.pool if caching else None)
        self.step = 0
        self.tokens: dict[str, int] = {}  # that the scheduler knows of a request: its last one has no KV yet
        self.named: dict[str, int] = {}  # leading blocks of a request that have been named

    def request(self, name: str, keys: list[int], tokens: int, table: list[int] | None = None) -> Track:
        track = Track(name, None, Chain([key(k) for k in keys], uniform(BUILTIN["24h"])))
        self.confirmer.start(track)
        self.tokens[name] = tokens
        if table:
            self.confirmer.place(track, table)
        return track

    def plan(self, *spans: tuple[Track, int, int]) -> int:
        self.step += 1
        for track, begin, end in spans:
            named = min(end, self.tokens[track.name]) // SIZE  # drafts have no name before they are accepted
            for depth in range(min(begin // SIZE, self.named.get(track.name, 0)), min(named, len(track.chain))):
                if self.pool.name.get(track.table[depth]) == track.chain[depth]:
                    continue  # its content is computed again under the name it has
                self.pool.fill(track.table[depth], track.chain[depth])
            self.named[track.name] = named
        for track, begin, end in spans:
            self.confirmer.cover(track, begin, end)
        self.confirmer.plan(self.step)
        return self.step

    def complete(self, step: int) -> list[tuple[str, int]]:
        fresh = self.confirmer.complete(step, lambda track: self.tokens[track.name] - 1)
        self.confirmer.check()
        return [(c.track.name, c.start + i) for c in fresh if not c.found for i in range(len(c.blocks))]


def test_a_block_counts_once_its_step_has_completed() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2, 3], 13, [5, 6, 7])
    first, second = engine.plan((one, 0, 6)), engine.plan((one, 6, 12))
    assert engine.complete(first) == [("one", 0)]
    assert engine.complete(second) == [("one", 1), ("one", 2)]


def test_the_last_sampled_token_has_no_kv_yet() -> None:
    engine = Engine()
    one = engine.request("one", [1], 4, [5])
    assert engine.complete(engine.plan((one, 0, 4))) == []
    engine.tokens["one"] = 5
    assert engine.complete(engine.plan((one, 4, 5))) == [], "it was not computed in this step either"


def test_what_another_request_is_computing_in_the_same_step_may_be_built_upon() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2], 9, [5, 6])
    two = engine.request("two", [1, 3], 9, [5, 7])
    assert engine.complete(engine.plan((one, 0, 8), (two, 4, 8))) == [("one", 0), ("one", 1), ("two", 1)]


def test_a_failed_load_spoils_what_was_planned_over_it_until_it_is_computed_again() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2, 3], 13, [5, 6, 7])
    engine.pool.fill(5, key(1))
    first = engine.plan((one, 4, 8))  # block 5 was to be loaded before this step
    second = engine.plan((one, 8, 12))
    engine.confirmer.fail([5])
    assert engine.complete(first) == [] and engine.complete(second) == []
    again = engine.plan((one, 0, 12))
    assert engine.complete(again) == [("one", 0), ("one", 1), ("one", 2)]


def test_a_neighbour_on_a_spoiled_block_is_never_kept_not_even_after_the_repair() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2], 9, [5, 6])
    engine.pool.fill(5, key(1))
    spoiled = engine.plan((one, 4, 8))
    engine.confirmer.fail([5])
    engine.complete(spoiled)
    two = engine.request("two", [1, 2, 3], 13, [5, 6, 7])  # found both blocks under their names
    step = engine.plan((two, 8, 12))
    repair = engine.plan((one, 0, 8))
    assert engine.complete(step) == []
    assert engine.complete(repair) == [("one", 0), ("one", 1)]
    engine.tokens["two"] = 17
    two.chain.append(key(4))
    engine.confirmer.extend(two, [8])
    assert engine.complete(engine.plan((two, 12, 16))) == []


def test_a_neighbour_that_began_on_a_spoiled_block_is_not_kept_when_it_ends_on_a_repaired_one() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2], 9, [5, 6])
    engine.pool.fill(5, key(1))
    engine.plan((one, 4, 8))
    engine.confirmer.fail([5])
    two = engine.request("two", [1, 2, 3], 13, [5, 6, 7])
    begun = engine.plan((two, 8, 10))
    assert engine.complete(begun) == []
    assert engine.complete(engine.plan((one, 0, 8))) == [("one", 0), ("one", 1)]
    assert engine.complete(engine.plan((two, 10, 11))) == []
    assert engine.complete(engine.plan((two, 11, 12))) == []


def test_decoding_confirms_a_block_in_the_step_that_fills_it() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2, 3], 6, [5, 6])
    assert engine.complete(engine.plan((one, 0, 5))) == [("one", 0)]
    for begin in (5, 6):
        engine.tokens["one"] = begin + 2
        assert engine.complete(engine.plan((one, begin, begin + 1))) == []
    engine.tokens["one"] = 9
    assert engine.complete(engine.plan((one, 7, 8))) == [("one", 1)]


def test_rejected_drafts_are_no_content() -> None:
    """Speculative decoding plans tokens that may turn out otherwise, and then goes back behind them."""
    engine = Engine()
    one = engine.request("one", [1, 2], 6, [5, 6])
    assert engine.complete(engine.plan((one, 0, 5))) == [("one", 0)]
    engine.tokens["one"] = 7
    assert engine.complete(engine.plan((one, 5, 8))) == [], "two of three drafts were rejected"
    engine.tokens["one"] = 8
    assert engine.complete(engine.plan((one, 6, 9))) == [], "all were rejected"
    engine.tokens["one"] = 10
    assert engine.complete(engine.plan((one, 7, 9))) == [("one", 1)]


def test_a_stretch_with_a_hole_is_not_trusted_behind_it() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2], 9, [5, 6])
    assert engine.complete(engine.plan((one, 0, 5))) == [("one", 0)]
    assert engine.complete(engine.plan((one, 6, 8))) == [], "nobody computed token 5"


def test_an_aborted_requests_last_step_counts_only_for_blocks_that_nobody_took() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2], 9, [5, 6])
    step = engine.plan((one, 0, 8))
    engine.confirmer.finish("one")
    engine.pool.fill(6, key(9))  # handed out while the forward ran
    assert engine.complete(step) == [("one", 0)]


def test_preemption_voids_what_was_planned_before() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2], 9, [5, 6])
    step = engine.plan((one, 0, 8))
    engine.confirmer.displace(one)
    assert engine.complete(step) == []
    engine.confirmer.place(one, [6, 5])
    assert engine.complete(engine.plan((one, 0, 8))) == [("one", 0), ("one", 1)]


def test_loaded_blocks_carry_trust_up_to_the_first_bad_one() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2, 3, 4], 17, [5, 6, 7, 8])
    for block, number in zip((5, 6, 7, 8), (1, 2, 3, 4), strict=True):
        engine.pool.fill(block, key(number))
    one.load_begin, one.loaded = 0, 12
    engine.confirmer.fail([7])
    assert one.loaded == 8
    assert engine.complete(engine.plan((one, 8, 16))) == [("one", 0), ("one", 1), ("one", 2), ("one", 3)]


def test_the_same_content_filled_anew_is_another_tenancy() -> None:
    engine = Engine()
    one = engine.request("one", [1], 5, [5])
    engine.plan((one, 0, 4))
    (fresh,) = engine.confirmer.complete(1, lambda track: 4)
    assert isinstance(fresh, Confirmed) and engine.confirmer.lasting([5], fresh.tokens) == [True]
    engine.pool.fill(5, key(1))
    assert engine.confirmer.lasting([5], fresh.tokens) == [False] and engine.confirmer.token(5) is None


def test_without_names_a_block_belongs_to_its_request_as_long_as_that_holds_it() -> None:
    engine = Engine(caching=False)
    one = engine.request("one", [1, 2], 9, [5, 6])
    engine.plan((one, 0, 8))
    (fresh,) = engine.confirmer.complete(1, lambda track: 8)
    assert fresh.blocks == [5, 6] and engine.confirmer.lasting(fresh.blocks, fresh.tokens) == [True, True]
    engine.confirmer.displace(one)
    assert engine.confirmer.lasting(fresh.blocks, fresh.tokens) == [False, False]


def test_steps_that_are_planned_before_drafts_are_refused_count() -> None:
    """Asynchronous scheduling plans a step as if all drafts of the last one were right; the step then computes from the
    first refused one on. Every step here has three drafts, of which one is right."""
    engine = Engine()
    one = engine.request("one", [1, 2, 3, 4], 5, [5, 6, 7, 8])
    one.drafts = True
    assert engine.complete(engine.plan((one, 0, 4))) == [("one", 0)]
    under_way, found = engine.plan((one, 4, 8)), []
    for known in (6, 8, 10, 12, 14, 16, 18):  # tokens that have KV once the step under way has run
        behind = engine.plan((one, known + 2, known + 6))  # two refused drafts further than where it computes from
        engine.tokens["one"] = known + 1
        found += engine.complete(under_way)
        under_way = behind
    assert found == [("one", 1), ("one", 2), ("one", 3)]


def test_a_block_that_accepted_drafts_fill_counts_once_it_is_named() -> None:
    """The pool names a block when the next step is planned: until then, drafts of this one could have been refused."""
    engine = Engine()
    one = engine.request("one", [1, 2, 3, 4], 5, [5, 6, 7, 8])
    one.drafts = True
    found = [engine.complete(engine.plan((one, 0, 4)))]
    for begin in (4, 6, 8, 10, 12):  # two tokens a step: one that was sampled, and a draft, which is right
        step = engine.plan((one, begin, begin + 2))
        engine.tokens["one"] = begin + 3
        found.append(engine.complete(step))
    assert found == [[("one", 0)], [], [], [("one", 1)], [], [("one", 2)]], "the third step fills the second block"


def test_a_block_whose_name_changes_is_named_anew() -> None:
    """A session goes on after its last token was dropped: the block that held it gets another name."""
    engine = Engine(caching=False)
    one = engine.request("one", [1, 2], 8, [5, 6])
    assert engine.complete(engine.plan((one, 0, 7))) == [("one", 0)]
    before = one.chain
    assert engine.confirmer.rename(one, 1) == [] and before == [key(1), key(2)]
    one.chain.append(key(9))
    engine.tokens["one"] = 12
    (fresh,) = engine.confirmer.complete(engine.plan((one, 7, 9)), lambda track: 9)
    assert (fresh.start, fresh.track.chain) == (1, [key(1), key(9)])
    assert engine.confirmer.rename(one, 1) == [6], "confirmed under a name that it has no more"


def test_of_other_weights_nothing_counts_not_even_behind_a_request_that_stood_still() -> None:
    """The step that told of them had no room for it. It goes on right where it was trusted up to."""
    engine = Engine()
    still = engine.request("still", [1, 2, 3], 13, [5, 6, 7])
    other = engine.request("other", [4, 9], 9, [8, 9])
    assert engine.complete(engine.plan((still, 0, 4), (other, 0, 4))) == [("still", 0), ("other", 0)]
    told = engine.plan((other, 4, 8))
    engine.confirmer.forget()
    assert engine.complete(told) == []
    assert engine.complete(engine.plan((still, 4, 8))) == []
    assert engine.complete(engine.plan((still, 8, 12))) == []
    later = engine.request("later", [1, 2, 3], 13, [5, 6, 10])
    assert engine.complete(engine.plan((later, 8, 12))) == [], "it found blocks of the old weights"
    fresh = engine.request("fresh", [11], 5, [11])
    assert engine.complete(engine.plan((fresh, 0, 4))) == [("fresh", 0)], "the control"


def test_after_an_error_nothing_counts_until_the_whole_table_is_known_again() -> None:
    engine = Engine()
    one = engine.request("one", [1, 2, 3], 13, [5, 6])
    engine.plan((one, 0, 6))
    engine.confirmer.lose()
    assert engine.confirmer.extend(one, [7]) == [] and one.table == [], "where it belongs is not known"
    engine.confirmer.cover(one, 6, 12)
    engine.confirmer.plan(2)
    assert engine.complete(2) == []
    engine.step = 2
    engine.confirmer.place(one, [5, 6, 7])
    assert engine.complete(engine.plan((one, 0, 12))) == [("one", 0), ("one", 1), ("one", 2)]
