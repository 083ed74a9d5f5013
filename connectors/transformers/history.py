"""The tokens that a cache holds the KV of, as forward passes gave them, and why that KV may be another one.

Blocks are named by tokens, so a cache is kept only where its KV is that of the tokens it is named by: computed in
passes that ended, over these tokens, each at its own position, with nothing masked, and given nothing else that may
change it: an argument that is not known counts. All of this shows where a pass begins. Nothing is read back from the
device before the cache is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MASKED = "a pass over it masked tokens as padding"
_SHORT = "a pass over it had an attention mask for fewer tokens than there were, and the latest were masked"
_NEUTRAL = frozenset(
    {
        "input_ids", "past_key_values", "use_cache", "attention_mask", "position_ids", "cache_position", "labels",
        "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
        "return_dict",
    }
)  # fmt: skip
"""Arguments of a pass that are looked at by themselves, or change what it returns and not its KV."""
_MEDIA = "a pass over it was told that tokens stand for images, videos or sound"
_MOVED = "a pass over it gave tokens other positions than their own"


class TokenHistory:
    """Of one cache, which begins with `tokens` (NumPy, on the host). A reason against it holds for good: what a pass
    left behind cannot be told from the rest."""

    def __init__(self, tokens: Any) -> None:
        import torch

        self._parts: list[tuple[int, torch.Tensor]] = [(0, torch.as_tensor(tokens))]  # by the first one's position
        self._length = len(tokens)
        self._problem = ""
        self._doubts: dict[str, torch.Tensor] = {}  # reason → whether it applies; on the device
        self._under_way = False

    @property
    def length(self) -> int:
        """Tokens in the passes so far, less those that were taken back."""
        return self._length

    def spoil(self, reason: str) -> None:
        """The KV is not that of the tokens; the first reason is told."""
        self._problem = self._problem or reason

    def begins(self, length: int, ids: torch.Tensor | None) -> None:
        """A pass begins over `ids` [1, tokens], where the cache holds `length` tokens."""
        if self._under_way:
            self.spoil("a pass over it ended with an error")
        self._under_way = True
        if length > self._length:
            self.spoil("it holds tokens that no pass was seen for")
        if ids is None:
            self.spoil("a pass over it was given embeddings, which no tokens name")
        elif ids.ndim != 2 or ids.shape[0] != 1:
            self.spoil("a pass over it had several rows")
        elif not self._problem:
            self._take_back(length)
            self._parts.append((length, ids[0].detach().clone()))
            self._length += ids.shape[1]

    def looks(self, length: int, tokens: int, named: Mapping[str, Any]) -> None:
        """A pass over so many tokens, behind `length` others, has these arguments."""
        import torch

        mask = named.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self._doubt(_MASKED, ~mask.bool().all())
            if mask.shape[-1] < length + tokens:
                self.spoil(_SHORT)
        elif mask is not None:
            self.spoil("a pass over it had an attention mask of its own form")
        for name, value in named.items():
            if value is None or name in _NEUTRAL or (name == "is_causal" and value is True):
                continue
            if name == "mm_token_type_ids" and isinstance(value, torch.Tensor):
                self._doubt(_MEDIA, value.any())  # zeros say that all of it is text
            else:
                self.spoil(f"a pass over it was given `{name}`, which may change its KV")
        for places in (named.get("position_ids"), named.get("cache_position")):
            if isinstance(places, torch.Tensor):
                own = torch.arange(length, length + tokens, device=places.device)
                self._doubt(_MOVED, (places != own).any() if places.shape[-1] == tokens else own.new_ones(()).bool())

    def ended(self, length: int) -> None:
        """The pass has ended, and left so many tokens in the cache."""
        self._under_way = False
        if length != self._length and not self._problem:
            if length == self._parts[-1][0]:
                self._take_back(length)  # it was told not to use the cache
            else:
                self.spoil("a pass over it left another number of tokens than it was given")

    def problem(self, tokens: Any, length: int) -> str:
        """Why the first `length` tokens of the cache are not to be kept as those of `tokens` (NumPy); "" if they are.
        Waits for the device."""
        if self._under_way:
            self.spoil("a pass over it ended with an error, or has not ended")
        for reason, applies in self._doubts.items():
            if bool(applies):
                self.spoil(reason)
        if length > self._length:
            self.spoil("it holds tokens that no pass was seen for")
        if self._problem:
            return f"the KV in this cache is not its tokens' own: {self._problem}; fetch another one"
        own = self._tokens()[:length]
        differs = (own != tokens[:length]).nonzero()[0]
        if len(differs):
            return f"this cache was fetched for other tokens, or was given others: token {differs[0]} is not its own"
        return ""

    def _tokens(self) -> Any:
        import torch

        device = self._parts[-1][1].device
        joined = torch.cat([part.to(device) for _, part in self._parts]).cpu()
        self._parts = [(0, joined)]
        return joined.numpy()

    def _take_back(self, length: int) -> None:
        while self._parts and self._parts[-1][0] >= length and len(self._parts) > 1:
            self._parts.pop()
        begin, last = self._parts[-1]
        self._parts[-1] = begin, last[: max(0, length - begin)]
        self._length = length

    def _doubt(self, reason: str, applies: torch.Tensor) -> None:
        before = self._doubts.get(reason)
        self._doubts[reason] = applies if before is None else before | applies
