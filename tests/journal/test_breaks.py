"""The dearest breaks of made-up traffic: which requests belong together, what was lost, and for what cause."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.identity.keys import SHARED, Scope, scope_of
from kvtier.journal.breaks import CostlyBreak, _agreed_in_scope, _longest_agreed, dearest, losses, nearest
from kvtier.journal.figures import heat, reason_of, slow
from kvtier.journal.served import Remembered, ServedRequest

BLOCK = 16
SECRET = b"drawn by the process"
RANDOM = random.Random(3)


def text(length: int) -> list[int]:
    return [RANDOM.randrange(50_000) for _ in range(length)]


def request(name: str, tokens: Sequence[int], scope: Scope = SHARED, seed: bytes = b"", **facts: Any) -> Remembered:
    """`seed`: what is hashed beside the tokens."""
    tails, digest = bytearray(), hashlib.blake2b(scope + seed)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest.update(array("I", tokens[end - BLOCK : end]).tobytes())
        tails += digest.digest()[-8:]
    served = ServedRequest(name, scope, facts.pop("at_s", 0.0), len(tokens), **facts)
    return Remembered(served, bytes(tails), array("I", tokens))


def top(latest: list[Remembered], block_s: float | None = None) -> list[CostlyBreak]:
    return dearest(losses(latest, BLOCK, lambda: None), BLOCK, block_s, SECRET)


SYSTEM = text(512)


def test_each_request_finds_the_one_that_it_goes_on_from() -> None:
    """All share the system prompt; conversations go on in turns."""
    talks = [text(400) for _ in range(6)]
    first = [request(f"a{n}", [*SYSTEM, *talk]) for n, talk in enumerate(talks)]
    second = [request(f"b{n}", [*SYSTEM, *talk, *text(100)]) for n, talk in enumerate(talks)]
    assert nearest([*first, *second], lambda: None)[6:] == [0, 1, 2, 3, 4, 5]
    short = [
        request(f"{turn}{n}", [*SYSTEM, *SYSTEM[::-1], *talk[:48]]) for turn in "ab" for n, talk in enumerate(talks)
    ]
    assert nearest(short, lambda: None)[6:] == [0, 1, 2, 3, 4, 5]
    without = [one._replace(tokens=array("I")) for one in [*first, *second]]
    assert nearest(without, lambda: None)[6:] == [0, 1, 2, 3, 4, 5]
    assert nearest([request("x", text(500)), request("y", text(500))], lambda: None) == [None, None]
    assert nearest([], lambda: None) == []


def test_a_time_in_the_system_prompt_is_the_dearest_break() -> None:
    history = text(1600)
    latest = [request(f"t{n}", [*SYSTEM[:208], 60_000 + n, *SYSTEM[208:], *history], given={}) for n in range(5)]
    (parted, gone) = top(latest, 0.01)
    assert (parted.cause, parted.requests, parted.same_tokens, parted.latest) == ("value", 4, 208, "t4")
    assert parted.lost_tokens == 4 * (512 - 208 + 1600) and parted.lost_seconds == pytest.approx(4 * 1904 / 16 * 0.01)
    assert (gone.cause, gone.lost_tokens) == ("not_read", 4 * 208)


def test_the_longest_agreement_is_that_of_all_earlier_ones() -> None:
    """Against all pairs, over a tree of prompts."""
    stems = [text(16 * RANDOM.randrange(1, 9)) for _ in range(5)]
    latest = []
    for number in range(60):
        whole = [token for _ in range(RANDOM.randrange(1, 5)) for token in RANDOM.choice(stems)]
        latest.append(request(f"r{number}", whole, RANDOM.choice([SHARED, scope_of("other")])))
    for later, found in enumerate(_longest_agreed(latest)):
        agreed = [_agreed_in_scope(latest[earlier], latest[later]) for earlier in range(later)]
        most, blocks = max(agreed, default=0), len(latest[later].tails) // 8
        assert (agreed[found] == most) if found is not None else (most == 0 or most * 8 < blocks)


def test_what_was_given_is_no_loss() -> None:
    one = [*SYSTEM, *text(512)]
    latest = [
        request("a", one),
        request("b", [*one, *text(64)], given={"g1": 512, "g2": 512}),
        request("c", [*one, *text(64)], given={"g2": 512}, why="evicted"),
    ]
    (row,) = top(latest)
    assert (row.cause, row.lost_tokens, row.latest, row.lost_seconds) == ("evicted", 512, "c", None)


def test_users_of_one_system_prompt_break_nothing() -> None:
    latest = [request(f"u{n}", [*SYSTEM, *text(2000)], given={"g2": 512} if n else {}) for n in range(20)]
    assert top(latest) == []


@pytest.mark.parametrize(
    ("other", "cause"), [({"scope": scope_of("other")}, "other_scope"), ({"seed": b"image"}, "other_contents")]
)
def test_equal_tokens_under_other_names_are_told(other: dict[str, Any], cause: str) -> None:
    (row,) = top([request("a", SYSTEM), request("b", SYSTEM, **other)])
    assert (row.cause, row.lost_tokens) == (cause, 496)  # the last token is computed in any case


def test_dropped_turns_and_a_part_that_was_inserted() -> None:
    turns = [text(320) for _ in range(4)]
    whole = [*SYSTEM, *turns[0], *turns[1], *turns[2]]
    given = {"g2": 512}
    latest = [request("a", whole), request("b", [*SYSTEM, *turns[1], *turns[2], *turns[3]], given=given)]
    assert [(row.cause, row.lost_tokens) for row in top(latest)] == [("truncated_history", 640)]
    latest = [request("a", whole), request("b", [*SYSTEM, *turns[3], *turns[0], *turns[1]], given=given)]
    assert [(row.cause, row.lost_tokens) for row in top(latest)] == [("inserted", 640)]


def test_ten_rows_at_most_the_dearest_first_and_names_tell_nothing() -> None:
    talks = [text(200 + 16 * n) for n in range(14)]
    latest = [request(f"{turn}{n}", talk) for turn in "ab" for n, talk in enumerate(talks)]
    rows = top(latest)
    assert len(rows) == 10 and [row.lost_tokens for row in rows] == sorted((r.lost_tokens for r in rows), reverse=True)
    again = dearest(losses(latest, BLOCK, lambda: None), BLOCK, None, b"another process")
    assert not {row.prefix for row in rows} & {row.prefix for row in again} and all(len(r.prefix) == 8 for r in rows)


def test_heat_adds_up_what_begins_alike() -> None:
    latest = [request(f"u{n}", [*SYSTEM, *text(64)], at_s=90.0, given={"g1": 256, "g3": 256}) for n in range(3)]
    latest.append(request("alone", text(96), at_s=99.0))
    first, second = heat(latest, BLOCK, SECRET, 100.0)
    assert (first.requests, first.shared_tokens, first.input_tokens, first.computed) == (3, 512, 3 * 576, 3 * 64)
    assert first.given == {"g1": 768, "g3": 768} and first.ago_s == 10.0
    assert (second.requests, second.shared_tokens, second.computed, second.ago_s) == (1, 96, 96, 1.0)


def test_slow_requests_have_their_reasons() -> None:
    latest = [
        request("quick", SYSTEM, placed_s=0.01, first_s=0.02),
        request("queue", SYSTEM, placed_s=3.0, waited_s=0.1, first_s=3.5),
        request("tiers", SYSTEM, placed_s=2.0, waited_s=1.9, first_s=2.1),
        request("prefill", SYSTEM, placed_s=0.5, first_s=9.0),
        request("unmeasured", SYSTEM),
    ]
    rows = slow(latest, BLOCK, None, 1.0)
    assert [(row["name"], row["reason"]) for row in rows] == [
        ("prefill", "computed"), ("queue", "queued"), ("tiers", "tiers"), ("quick", "queued"),
    ]  # fmt: skip
    admitted = request("admitted", SYSTEM, placed_s=0.5).served  # its first token is not known
    assert reason_of(admitted, BLOCK, 0.1) == "computed" and reason_of(admitted, BLOCK, None) == "queued"
