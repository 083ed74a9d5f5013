"""What blocks hold goes into pages, and comes out of them as it was."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtier.connectors.contents import ContentPage, Passage, described
from kvtier.errors import CorruptError
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SHARED, Scope, scope_of
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.protocol import CONTENT_BYTES_MAX, CONTENT_PART_BYTES

SIZE = 16


def passage_of(blocks: int, vocabulary: int = 1 << 18, seed: int = 0, scope: Scope = SHARED, **more: object) -> Passage:
    tokens = random.Random(seed).choices(range(vocabulary), k=blocks * SIZE)
    fields: dict[str, object] = {"parent": None, "extra_keys": [None] * blocks, **more}
    return Passage(chain_of(sample_namespace(), blocks, seed, scope), tokens=tokens, **fields)  # type: ignore[arg-type]


def fields_of(passage: Passage) -> tuple[object, ...]:
    return (
        passage.keys, passage.parent, list(passage.tokens), list(passage.extra_keys), passage.salt, passage.adapter,
        passage.extra_key,
    )  # fmt: skip


ALL = [
    passage_of(1, vocabulary=2),
    passage_of(7, parent=bytes(range(HASH_BYTES)), vocabulary=1 << 32),
    passage_of(5, 129_280, 1, scope_of("tenant"), salt="tenant", extra_keys=[("tenant",), *[None] * 4]),
    passage_of(3, 5, 2, scope_of(None, b"tuned"), adapter=(7, "tuned"), extra_keys=[("tuned",)] * 3),
    passage_of(3, 5, 3, adapter=(7, "tuned"), extra_keys=[("tuned",), None, ("tuned", ("image", "a" * 64, -3))]),
    passage_of(3, 5, 4, scope_of(None, b"kind"), extra_key="kind"),
]


def test_passages_come_back_as_they_were() -> None:
    page = ContentPage()
    for passage in ALL:
        assert page.add(passage) == len(passage.keys)
    found = list(map(described, page.parts))
    assert [fields_of(one.passage()) for one in found] == [fields_of(one) for one in ALL]
    for one, passage in zip(found, ALL, strict=True):
        before = None if passage.parent is None else passage.keys[0][:-HASH_BYTES] + passage.parent
        assert (one.keys, one.parent) == (passage.keys, before)


def test_a_page_has_what_fits_at_less_than_70_bytes_per_block() -> None:
    passage, pages, begin = passage_of(1000), [ContentPage()], 0
    while begin < 1000:
        count = pages[-1].add(passage.part(begin, 1000))
        begin += count
        if not count:
            pages.append(ContentPage())
    sizes = [sum(CONTENT_PART_BYTES + len(part) for part in page.parts) for page in pages]
    assert max(sizes) <= CONTENT_BYTES_MAX and sum(sizes) / 1000 < 70
    found = [described(part).passage() for page in pages for part in page.parts]
    whole = found[0]
    for one in found[1:]:
        assert one.parent == whole.keys[-1][-HASH_BYTES:]
        whole = whole.joined(one)
    assert fields_of(whole) == fields_of(passage)


@pytest.mark.parametrize("wrong", ["bytes beside", "negative token", "huge token", "long JSON", "no Unicode"])
def test_one_that_no_page_can_have_is_passed_over(wrong: str) -> None:
    page, tokens = ContentPage(), [1] * 2 * SIZE
    extra: list[tuple[object, ...] | None] = [None, None]
    if wrong == "bytes beside":
        extra = [(b"embedding",), None]
    elif wrong == "long JSON":
        extra = [("x" * CONTENT_BYTES_MAX,), ("x" * 70_000,)]
    elif wrong == "no Unicode":
        extra = [("\ud800",), ("\udfff",)]
    else:
        tokens[5] = -1 if wrong == "negative token" else 1 << 40
    passage, begin = Passage(chain_of(sample_namespace(), 2), None, tokens, extra), 0
    while begin < 2:
        count = page.add(passage.part(begin, 2))
        assert count, "the page is empty: nothing is gained by another one"
        begin += count
    assert not page.parts


def test_bytes_of_another_making_are_refused() -> None:
    page, chance = ContentPage(), random.Random(7)
    page.add(ALL[2])
    (good,) = page.parts
    for part in (
        b"",
        good[:-1],
        good + b"x",
        good[:52] + b"\xff" + good[53:],
        *map(chance.randbytes, range(0, 200, 9)),
    ):
        with pytest.raises(CorruptError):
            described(part)
    for beside in (b'{"salt":7}', b"[" * 5000, b'{"extra":[]}', b"tenant"):
        with pytest.raises(CorruptError):
            replace(described(good), _beside=beside).passage()
