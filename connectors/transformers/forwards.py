"""Forward passes of a model over the caches that `fetch` returned, and what its groups held at boundaries.

A window keeps its last tokens only, and a state is one value: both exist at the end of a forward pass, and the next
one writes over them. So a boundary can be kept only where a pass ends. Passes are made to end where prompts end and
where they leave a chain that is known (`advance`); of those that the model's owner runs, each is looked at as it ends.

Followed through hooks of the model's decoder, until `close`. An error in one costs boundaries, never the pass.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.connectors.transformers.groups import LayerGroups

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_FAR = 4
"""Blocks of the full group between boundaries that are kept for their distance alone, per block of theirs: so these
come to at most a quarter of the full group's bytes."""


@dataclass(slots=True)
class _Followed:
    """One cache, which began with `begin` tokens; of the prompt's chain, `known` were stored. `taken` by boundary. The
    last one, `passing`, leaves when the next comes, unless it is kept."""

    begin: int
    known: int
    taken: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    passing: int = 0


class Forwards:
    """See the module. `counts` are the blocks of the groups beside the full one at a boundary."""

    def __init__(
        self, model: Any, groups: LayerGroups, block_tokens: int, counts: Callable[[int], Sequence[int]]
    ) -> None:
        self._model, self._groups, self._block_tokens, self._counts = model, groups, block_tokens, counts
        self._followed: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        decoder, me = model.get_decoder(), weakref.ref(self)

        def before(_module: Any, _args: Any, named: dict[str, Any]) -> None:
            if (forwards := me()) is not None:
                forwards._guarded(forwards._begins, named.get("past_key_values"))

        def after(_module: Any, _args: Any, named: dict[str, Any], _output: Any) -> None:
            if (forwards := me()) is not None:
                forwards._guarded(forwards._ended, named.get("past_key_values"))

        self._hooks = [
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after, with_kwargs=True),
        ]

    def close(self) -> None:
        """Leave the model as it was. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._followed.clear()

    def follow(self, cache: Any, known: int) -> None:
        """Look at the passes over this cache from now on. Of its prompt's chain, `known` tokens are stored."""
        self._followed[cache] = _Followed(cache.get_seq_length(), known)

    def advance(self, cache: Any, ids: torch.Tensor) -> list[int]:
        """Run the model over the prompt, from where `cache`, which is followed, ends up to the prompt's last boundary:
        in passes that end at boundaries that are worth keeping, among them where the prompt leaves a chain that is
        stored. Returns these ends."""
        import torch

        begin, size, followed = cache.get_seq_length(), self._block_tokens, self._followed[cache]
        ends = sorted(self._ends(begin, followed.known, (ids.shape[1] - 1) // size * size))
        followed.kept.update(ends)
        last = {"logits_to_keep": 1} if self._last_only else {}
        for end in ends:
            with torch.no_grad():
                mask = torch.ones((1, end), dtype=torch.long, device=ids.device)
                self._model(ids[:, begin:end], attention_mask=mask, past_key_values=cache, use_cache=True, **last)
            begin = end
        return ends

    def _ends(self, begin: int, known: int, prompt: int) -> set[int]:
        ends = {end for end in (known, prompt) if begin < end <= prompt}
        far = self._far(prompt)
        return ends.union(range(begin + far, prompt, far)) if ends else ends

    def _far(self, tokens: int) -> int:
        """Tokens between boundaries that are kept for their distance alone."""
        return _FAR * self._block_tokens * sum(self._counts(tokens))

    def boundaries(self, cache: Any) -> dict[int, list[list[torch.Tensor]]]:
        """What the groups held, by boundary, ascending; of a cache that is not followed, at most where it ends."""
        length = cache.get_seq_length()
        followed = self._followed.get(cache)
        taken = {} if followed is None else followed.taken
        if followed is None and length and length % self._block_tokens == 0:
            here = self._groups.take(cache, length)
            taken = {} if here is None else {length: here}
        return {tokens: taken[tokens] for tokens in sorted(taken) if tokens <= length}

    # --- passes ------------------------------------------------------------------------------------------------

    def _guarded(self, look: Callable[[_Followed, Any], None], cache: Any) -> None:
        followed = None if cache is None else self._followed.get(cache)
        if followed is None:
            return
        try:
            look(followed, cache)
        except Exception:
            log.exception("kvtier: a forward pass was not followed; nothing of it is kept at boundaries")
            followed.taken.clear()

    def _begins(self, followed: _Followed, cache: Any) -> None:
        """A pass begins where the cache ends: whatever was taken beyond is of tokens that were taken back."""
        for tokens in [tokens for tokens in followed.taken if tokens > cache.get_seq_length()]:
            del followed.taken[tokens]

    def _ended(self, followed: _Followed, cache: Any) -> None:
        tokens = cache.get_seq_length()
        if tokens % self._block_tokens or tokens <= followed.begin:
            return
        taken = self._groups.take(cache, tokens)
        if taken is None:
            return
        if followed.passing not in followed.kept:
            before = max((kept for kept in followed.kept if kept < followed.passing), default=followed.begin)
            if followed.passing - before >= self._far(followed.passing):
                followed.kept.add(followed.passing)
            else:
                followed.taken.pop(followed.passing, None)
        followed.taken[tokens], followed.passing = taken, tokens
