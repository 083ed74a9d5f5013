"""When two answers of an engine are the same one."""

from __future__ import annotations

from typing import Any

TIE = 1e-3
"""Log-probabilities. Two tokens closer than this may change places where floats are added up in another order: in a
batch of other requests, or in prompts cut into other pieces. On the CPU that moves them by 1e-5 at most."""


def alike(found: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether the tokens are equal, or begin to differ where the two best of `own` were as good as tied."""
    for step, (token, expected) in enumerate(zip(found["tokens"], own["tokens"], strict=True)):
        if token != expected:
            return bool(own["gaps"][step] < TIE)
    return True
