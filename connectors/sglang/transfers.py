"""What SGLang's tree hands to a linker: pages of one pool each, by their hashes and by their token slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PAGES, WINDOWS, STATES = "kv", "swa", "mamba"
"""SGLang's PoolName of the layers of full attention, of windows and of states."""


def of_pool(transfers: Sequence[Any], name: Any) -> Any:
    """The transfer of a pool. Raises StopIteration where there is none."""
    return next(transfer for transfer in transfers if transfer.name == name)


def page_numbers(indices: Any, page: int) -> list[int]:
    """Page numbers of token slots. Empty unless they are whole, aligned pages."""
    rows = indices.detach().to("cpu").view(-1, page)
    first = rows[:, 0]
    aligned = bool((first % page == 0).all()) and bool((rows[:, -1] - first == page - 1).all())
    return [int(number) for number in (first // page).tolist()] if aligned else []
