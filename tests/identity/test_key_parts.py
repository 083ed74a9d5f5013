"""A mapping in parts stays as small as one that was made at once, whatever comes and goes."""

from __future__ import annotations

import sys

from kvtier.identity.key_parts import KeyParts
from kvtier.testing import chain_of, sample_namespace


def test_it_stays_small_while_keys_come_and_go() -> None:
    """Parts that were left alone take twice the bytes."""
    parts, left = KeyParts(), KeyParts()
    keys = list(chain_of(sample_namespace(4096), 60_000))
    here: list[bytes] = []
    for number, key in enumerate(keys):
        for each in (parts, left):
            each.dicts[key[-1]][key] = number
            if len(here) == 8000:
                del each.dicts[here[0][-1]][here[0]]
        if len(here) == 8000:
            here[0] = here[-1]
            here.pop()
        here.append(key)
        parts.added(1)
    assert sum(map(len, parts.dicts)) == 8000 == sum(map(len, left.dicts))
    assert all(mine == other for mine, other in zip(parts.dicts, left.dicts, strict=True))
    assert sum(map(sys.getsizeof, parts.dicts)) < 0.7 * sum(map(sys.getsizeof, left.dicts))
