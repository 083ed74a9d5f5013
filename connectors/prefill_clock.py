"""The cost of the engine's own prefill, which loading is weighed against."""

from __future__ import annotations

from collections.abc import Callable


class PrefillClock:
    """Reports the time of batches to a manager.

    Engines launch a batch before the one before it has ended: time until then is the earlier one's. Short batches are
    left out, since a step has a cost of its own that does not grow with its tokens.
    """

    def __init__(self, computed: Callable[[int, float], None], block_tokens: int, least_blocks: int = 8) -> None:
        """`computed(blocks, seconds)` is called from `ran`, such as `Manager.computed`."""
        self._computed = computed
        self._block_tokens = block_tokens
        self._least = least_blocks
        self._free_at_s = 0.0

    def ran(self, tokens: int, began_s: float, ended_s: float) -> None:
        """A batch that computed `tokens` of prompts, and nothing else, was launched at `began_s` and over at `ended_s`,
        by the monotonic clock; 0 tokens for every other kind of batch."""
        seconds, self._free_at_s = ended_s - max(began_s, self._free_at_s), ended_s
        blocks = tokens // self._block_tokens
        if blocks >= self._least and seconds > 0:
            self._computed(blocks, seconds)
