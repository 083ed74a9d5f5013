"""Where two prompts part, by their token ids: against prompts that were made to part in a known way."""

from __future__ import annotations

import random

import pytest

from kvtier.journal.parting import RUN, SAMPLED_FROM, Parting, part, tokens_of

RANDOM = random.Random(7)


def text(length: int) -> list[int]:
    return [RANDOM.randrange(50_000) for _ in range(length)]


def parted(earlier: list[int], later: list[int]) -> Parting:
    return part(tokens_of(earlier), tokens_of(later))


HEAD, FIRST, SECOND, THIRD = text(100), text(300), text(300), text(300)


@pytest.mark.parametrize(
    ("earlier", "later", "cause", "skipped", "added", "shared"),
    [
        ([*HEAD, 1, 2, *FIRST], [*HEAD, 3, 4, *FIRST], "value", 2, 2, 300),
        ([*HEAD, 1, *FIRST], [*HEAD, *text(40), *FIRST], "value", 1, 40, 300),
        ([*HEAD, *FIRST, *SECOND], [*HEAD, *SECOND, *THIRD], "truncated_history", 300, 0, 300),
        ([*HEAD, *SECOND], [*HEAD, *FIRST, *SECOND], "inserted", 0, 300, 300),
        ([*HEAD, *FIRST, *THIRD], [*HEAD, *SECOND, *THIRD], "changed_part", 300, 300, 300),
        ([*HEAD, *FIRST], [*HEAD, *SECOND], "changed", None, None, 0),
        ([*HEAD, *FIRST], [*HEAD, *FIRST, *SECOND], "changed", None, None, 0),
        ([1, *FIRST], [2, *FIRST], "value", 1, 1, 300),
        ([], [1, 2, 3], "changed", None, None, 0),
        ([*HEAD, 1, *FIRST[: RUN - 1]], [*HEAD, 2, *FIRST[: RUN - 1]], "changed", None, None, 0),
    ],
)
def test_it_is_told_how_they_part(
    earlier: list[int], later: list[int], cause: str, skipped: int | None, added: int | None, shared: int
) -> None:
    found = parted(earlier, later)
    same = next((at for at, (one, two) in enumerate(zip(earlier, later, strict=False)) if one != two), None)
    assert found.same == (min(len(earlier), len(later)) if same is None else same)
    assert (found.cause, found.skipped, found.added, found.shared) == (cause, skipped, added, shared)


def test_a_long_prompt_is_sampled_and_said_about() -> None:
    rest = text(4 * SAMPLED_FROM)
    found = parted([*HEAD, 5, *rest], [*HEAD, 6, 7, *rest])
    assert (found.same, found.skipped, found.added, found.cause) == (100, 1, 2, "value")
    assert 0.9 * len(rest) < found.shared <= len(rest) + 2


def test_the_same_token_again_and_again_is_not_counted_twice() -> None:
    found = parted([1, *[9] * 500], [2, *[9] * 500])
    assert found.shared == 500 and found.cause == "value"
