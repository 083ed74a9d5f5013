"""A tier's answers and errors, before anybody relies on them.

A third party's tier may give too few answers, or such as the protocol has not. Taken for one, that fails far from the
tier: a priority that does not exist ends in the order of eviction, a short digest moves those of all slots behind it.
And a client library may raise what is no Exception: a panic of Rust's comes as a BaseException, which ends workers that
every Exception leaves alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from kvtier.checksum import DIGEST_BYTES
from kvtier.errors import TierError
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.supervisor import ENDING
from kvtier.tiers.protocol import Loaded, Miss, Stored

T = TypeVar("T")

ANSWERS, RESULTS, STORED = (Miss, type(None)), (Miss, Loaded), (Stored,)
"""The kinds of answers of a look-up, of a read and of a write."""


def answers_to(asked: Sequence[object], answers: Sequence[T], kinds: tuple[type, ...]) -> list[T]:
    """The answers, as a list of the caller's own. Raises ValueError unless there is one for each that was asked
    for, since nobody could say whose they are, and each is of one of these kinds, and sound."""
    if len(answers) != len(asked):
        raise ValueError(f"{len(answers)} answers where {len(asked)} were asked for")
    for kind in set(map(type, answers)):
        if not issubclass(kind, kinds):
            raise ValueError(f"an answer is of type {kind.__name__}")
        if issubclass(kind, Loaded) and not all(is_sound(cast(Loaded, each)) for each in answers if type(each) is kind):
            raise ValueError("a block was read without a digest, a life or a priority that blocks may have")
    return list(answers)


def is_sound(loaded: Loaded) -> bool:
    """Whether a block that was read is described by what blocks may have."""
    digest, life, priority = loaded.digest, loaded.life, loaded.priority
    described = isinstance(digest, bytes) and len(digest) == DIGEST_BYTES and isinstance(life, Lifetime)
    return described and isinstance(priority, int) and 0 <= priority <= PRIORITY_MAX


def at_once(tier: str, verb: str, work: Callable[..., T], *arguments: Any) -> T:
    """The result of a tier's verb that does not wait, on any thread. Raises TierError for what is no Exception, too,
    but for what ends the program."""
    try:
        return work(*arguments)
    except (Exception, *ENDING):
        raise
    except BaseException as error:
        raise tier_error(tier, verb, error) from error


def tier_error(tier: str, verb: str, error: BaseException) -> TierError:
    """Whatever a tier raised, as one of its errors."""
    return TierError(tier, verb, f"{type(error).__name__}: {error}")
