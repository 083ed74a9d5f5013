"""Forward passes of a model over the caches that `fetch` returned, and what its groups held at boundaries.

A window keeps its last tokens only, and a state is one value: both exist at the end of a forward pass, and the next
one writes over them. So a boundary can be kept only where a pass ends. Passes are made to end where prompts end and
where they leave a chain that is known (`advance`); of those that the model's owner runs, each is looked at as it ends.

Of every model, passes say which tokens a cache holds the KV of (`history`). Followed through hooks of the model and of
its decoder, until `close`. An error in one costs what could have been kept, never the pass.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.connectors.transformers.groups import LayerGroups
from kvtier.connectors.transformers.history import TokenHistory
from kvtier.connectors.transformers.settled import Settled

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_FAR = 4
"""Blocks of the full group between boundaries that are kept for their distance alone, per block of theirs: so these
come to at most a quarter of the full group's bytes."""


@dataclass(slots=True)
class _Followed:
    """One cache, which began with `begin` tokens; of the prompt's chain, `known` were stored. `taken` by boundary. The
    last one, `passing`, leaves when the next comes, unless it is kept. `asked`: tokens that the model was given for the
    pass; its decoder may be given embeddings of them."""

    begin: int
    known: int
    history: TokenHistory
    asked: torch.Tensor | None = None
    taken: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    passing: int = 0


class Forwards:
    """See the module. `counts` are the blocks of the groups beside the full one at a boundary."""

    def __init__(
        self,
        model: Any,
        groups: LayerGroups,
        block_tokens: int,
        counts: Callable[[int], Sequence[int]],
        settled: Settled,
    ) -> None:
        self._model, self._groups, self._block_tokens, self._counts = model, groups, block_tokens, counts
        self._followed: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._settled = settled
        decoder, outer = model.get_decoder(), getattr(model, "get_base_model", lambda: model)()
        self._hooks = [
            decoder.register_forward_pre_hook(self._hook("_begins"), with_kwargs=True),
            decoder.register_forward_hook(self._hook("_ended"), with_kwargs=True),
        ]
        if groups.beside:
            self._hooks.append(decoder.register_forward_hook(self._hook("_take"), with_kwargs=True))
        if outer is not decoder:
            self._hooks.append(outer.register_forward_pre_hook(self._hook("_asked"), with_kwargs=True))

    def _hook(self, look: str) -> Callable[..., None]:
        """A hook that calls a method of this object, which it does not keep alive."""
        me = weakref.ref(self)

        def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any], *_output: Any) -> None:
            if (forwards := me()) is not None:
                forwards._guarded(look, _by_name(module, args, named) if args else named)

        return hook

    def close(self) -> None:
        """Leave the model as it was. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._followed.clear()

    def follow(self, cache: Any, tokens: Any, known: int) -> None:
        """Look at the passes over this cache, which holds these tokens (NumPy), from now on. Of its prompt's chain,
        `known` tokens are stored."""
        self._followed[cache] = _Followed(len(tokens), known, TokenHistory(tokens))

    def follows(self, cache: Any) -> bool:
        """Whether this cache is followed."""
        return cache in self._followed

    def problem(self, cache: Any, tokens: Any) -> str:
        """Why the cache is not to be kept as that of leading `tokens` (NumPy); "" if it is, as far as can be told:
        of a cache that is not followed, nothing can."""
        followed = self._followed.get(cache)
        return "" if followed is None else followed.history.problem(tokens, cache.get_seq_length())

    def advance(self, cache: Any, ids: torch.Tensor) -> list[int]:
        """Run the model over the prompt, from where `cache`, which is followed, ends up to the prompt's last boundary:
        in passes that end at boundaries that are worth keeping, among them where the prompt leaves a chain that is
        stored. Returns these ends; none for a model without groups beside the full one."""
        import torch

        if not self._groups.beside:
            return []

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
        """What the groups beside the full one held, by boundary, ascending; of a cache that is not followed, at most
        where it ends."""
        if not self._groups.beside:
            return {}
        length = cache.get_seq_length()
        followed = self._followed.get(cache)
        taken = {} if followed is None else followed.taken
        if followed is None and length and length % self._block_tokens == 0:
            here = self._groups.take(cache, length)
            taken = {} if here is None else {length: here}
        return {tokens: taken[tokens] for tokens in sorted(taken) if tokens <= length}

    # --- passes ------------------------------------------------------------------------------------------------

    def _guarded(self, look: str, named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        followed = None if cache is None else self._followed.get(cache)
        if followed is None:
            return
        try:
            getattr(self, look)(followed, cache, named.get("input_ids"), named)
        except Exception:
            log.exception("kvtier: a forward pass was not followed; what it left is not kept")
            if look == "_take":
                followed.taken.clear()
            else:
                followed.history.spoil("a pass over it was not followed")

    def _asked(self, followed: _Followed, cache: Any, ids: torch.Tensor | None, named: dict[str, Any]) -> None:
        followed.asked = ids
        if ids is not None:
            followed.history.looks(cache.get_seq_length(), ids.shape[-1], named)

    def _begins(self, followed: _Followed, cache: Any, ids: torch.Tensor | None, named: dict[str, Any]) -> None:
        """A pass begins where the cache ends: whatever was taken beyond is of tokens that were taken back."""
        length, history = cache.get_seq_length(), followed.history
        self._look_at_layers(followed, cache, length)
        for tokens in [tokens for tokens in followed.taken if tokens > length]:
            del followed.taken[tokens]
        asked, followed.asked = followed.asked, None
        history.begins(length, asked if ids is None else ids)
        if asked is None and ids is not None:
            history.looks(length, ids.shape[-1], named)
        if self._model.training:
            history.spoil("the model was in training mode: call its eval() first")
        if change := self._settled.change():
            history.spoil(f"a pass over it ran {change}")

    def _ended(self, followed: _Followed, cache: Any, _ids: torch.Tensor | None, _named: dict[str, Any]) -> None:
        length = cache.get_seq_length()
        self._look_at_layers(followed, cache, length)
        followed.history.ended(length)

    def _look_at_layers(self, followed: _Followed, cache: Any, length: int) -> None:
        """Tokens may have been taken back from some layers only: a state, and a full window, cannot be cropped."""
        if self._groups.beside and not self._groups.hold(cache, length, length < followed.history.length):
            followed.history.spoil("tokens were taken back from it, and some of its layers still have them")

    def _take(self, followed: _Followed, cache: Any, _ids: torch.Tensor | None, _named: dict[str, Any]) -> None:
        """Take the boundary where a pass has ended, and leave the one before it, unless that is kept."""
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


def _by_name(module: Any, args: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a pass by their names, however they were given."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | named
