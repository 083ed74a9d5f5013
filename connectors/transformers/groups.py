"""The KV groups of a transformers model: which layers keep what, and the bytes that they need at a boundary.

Layers of full attention are cut into blocks of tokens. The others keep, at the end of a forward pass, only what the
next token reads: the last w-1 tokens of a window, or a state. At a boundary of T tokens a group beside the full one is

    its tensors, in the order of their forms, each as contiguous bytes, one after another
    (keys and values of min(T, w-1) tokens per layer of a window; a state as it is)

cut into blocks as long as one of the full group, the last one filled up with zeros.

Layers are told apart by transformers' own cache classes, by their exact type: a subclass may keep something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.connectors.configuration import digest16
from kvtier.errors import InvalidRequest
from kvtier.identity.groups import Kind

if TYPE_CHECKING:
    import torch

_FULL = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")
_WINDOW = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_STATE = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


@dataclass(frozen=True, slots=True)
class Form:
    """One tensor of one layer. `place`: which of the layer's states. `shape` of keys and values is that of one
    token."""

    layer: int
    part: str
    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def of_tokens(self) -> bool:
        """Whether the tensor grows with the tokens: keys and values."""
        return self.part in ("keys", "values")

    def shape_at(self, tokens: int) -> tuple[int, ...]:
        """The shape that holds so many tokens."""
        if not self.of_tokens:
            return self.shape
        row, heads, _, size = self.shape
        return row, heads, tokens, size

    def bytes_at(self, tokens: int) -> int:
        """Bytes of that shape."""
        count = int(self.dtype.itemsize)
        for size in self.shape_at(tokens):
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class BoundaryGroup:
    """A group beside the full one: windows of `window` tokens, or states (`window` is 0)."""

    kind: Kind
    window: int
    forms: tuple[Form, ...]

    @property
    def title(self) -> str:
        """For people: "window 512", "state"."""
        return f"{self.kind} {self.window}" if self.window else str(self.kind)

    @property
    def name(self) -> str:
        """For the namespace. A state means what the library's code made of the tokens, so its release counts."""
        forms = [[f.layer, f.part, f.place, list(f.shape), str(f.dtype).removeprefix("torch.")] for f in self.forms]
        release = _release() if self.kind is Kind.STATE else ""
        return f"{self.title.replace(' ', ':')}:{digest16([forms, release])}"

    def tokens(self, boundary: int) -> int:
        """How many tokens it holds at a boundary; 0 for states."""
        return min(boundary, self.window - 1) if self.window else 0

    def bytes_at(self, boundary: int) -> int:
        """Bytes of its tensors at a boundary."""
        return sum(form.bytes_at(self.tokens(boundary)) for form in self.forms)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers whose KV is cut into blocks of tokens, and the groups beside them: windows by their length, then
    states. Without any, a prefix may end with any block."""

    full: tuple[int, ...] = ()
    beside: tuple[BoundaryGroup, ...] = ()

    @property
    def name(self) -> str:
        """What the namespace adds to the full group's; "" for one group."""
        return "".join(f"+{group.name}" for group in self.beside)

    def counts(self, boundary: int, block_bytes: int) -> list[int]:
        """Blocks of each group beside the full one at a boundary."""
        return [-(-group.bytes_at(boundary) // block_bytes) for group in self.beside]

    def hold(self, cache: Any, length: int, taken_back: bool) -> bool:
        """Whether all layers hold the first `length` tokens, and nothing of those that were `taken_back`, if any were:
        layers that are cropped one by one may hold others, and a state those behind."""
        counting = {*self.full, *(form.layer for group in self.beside for form in group.forms if form.of_tokens)}
        states = {form.layer for group in self.beside for form in group.forms if not form.of_tokens}
        return all(cache.layers[index].get_seq_length() == length for index in counting) and not (
            taken_back and any(_remembers(cache.layers[index]) for index in states)
        )

    def take(self, cache: Any, boundary: int) -> list[list[torch.Tensor]] | None:
        """Each group's tensors in a cache that holds so many tokens; None where one has another form, so that the
        boundary cannot be kept. Windows may be views, which the library never writes to; states are copies."""
        taken = [[_tensor(cache, group, form, boundary) for form in group.forms] for group in self.beside]
        for group, tensors in zip(self.beside, taken, strict=True):
            for form, tensor in zip(group.forms, tensors, strict=True):
                wanted = form.shape_at(group.tokens(boundary))
                if tensor is None or tuple(tensor.shape) != wanted or tensor.dtype != form.dtype:
                    return None
        return [[tensor for tensor in tensors if tensor is not None] for tensors in taken]

    def pack(self, taken: Sequence[Sequence[torch.Tensor]], block_bytes: int) -> torch.Tensor:
        """The blocks of a boundary, one group after another: bytes [blocks, block_bytes] on the tensors' device."""
        import torch

        parts: list[torch.Tensor] = []
        for tensors in taken:
            flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
            parts += [flat, flat.new_zeros(-flat.numel() % block_bytes)]
        return torch.cat(parts).view(-1, block_bytes)

    def restore(self, cache: Any, boundary: int, blocks: torch.Tensor) -> None:
        """Give a fresh cache what `pack` made of its groups at a boundary."""
        begin, block_bytes = 0, blocks.shape[1]
        for group, count in zip(self.beside, self.counts(boundary, block_bytes), strict=True):
            tensors = _cut(group, boundary, blocks[begin : begin + count].reshape(-1))
            begin += count
            for form, tensor in zip(group.forms, tensors, strict=True):
                layer = cache.layers[form.layer]
                if form.part == "conv":
                    layer.update_conv_state(tensor, form.place)
                elif form.part == "recurrent":
                    layer.update_recurrent_state(tensor, form.place)
            if group.kind is Kind.WINDOW:
                for form, keys, values in zip(group.forms[::2], tensors[::2], tensors[1::2], strict=True):
                    layer = cache.layers[form.layer]
                    layer.update(keys, values)
                    layer.cumulative_length = boundary


def full_layers(cache: Any) -> tuple[int, ...]:
    """The layers of a cache that keep all tokens. Raises InvalidRequest for layers that cannot be kept exactly."""
    names = [type(layer).__name__ for layer in cache.layers]
    for index, name in enumerate(names):
        if name not in (*_FULL, *_WINDOW, *_STATE) or not _is_transformers(cache.layers[index], name):
            raise InvalidRequest(
                f"layer {index} of this cache is a {name}: only layers of full attention, sliding windows and states, "
                "in transformers' own dynamic classes, can be kept exactly; run this model without kvtier"
            )
    full = tuple(index for index, name in enumerate(names) if name in _FULL)
    if not full:
        raise InvalidRequest(
            f"no layer of this model keeps all tokens ({', '.join(sorted(set(names)))}): kvtier names what others keep "
            "by the blocks of one that does; run this model without kvtier"
        )
    return full


def groups_of(cache: Any) -> LayerGroups:
    """The groups of a model, by a cache that has been through it. Raises InvalidRequest as `full_layers` does."""
    full, names = full_layers(cache), [type(layer).__name__ for layer in cache.layers]
    windows: dict[int, list[Form]] = {}
    states: list[Form] = []
    for index, (layer, name) in enumerate(zip(cache.layers, names, strict=True)):
        if name in _WINDOW:
            windows.setdefault(_window_of(index, layer), []).extend(_keys_values(index, layer))
        if name in _STATE:
            states += _states(index, layer)
    beside = [BoundaryGroup(Kind.WINDOW, window, tuple(forms)) for window, forms in sorted(windows.items())]
    if states:
        beside.append(BoundaryGroup(Kind.STATE, 0, tuple(states)))
    return LayerGroups(full, tuple(beside))


def _is_transformers(layer: Any, name: str) -> bool:
    from transformers import cache_utils

    return type(layer) is getattr(cache_utils, name, None)


def _window_of(index: int, layer: Any) -> int:
    window = int(layer.sliding_window)
    if window < 2:
        raise InvalidRequest(f"layer {index} has a window of {window} tokens; run this model without kvtier")
    return window


def _keys_values(index: int, layer: Any) -> list[Form]:
    parts = (("keys", layer.keys), ("values", layer.values))
    return [Form(index, part, 0, (t.shape[0], t.shape[1], 1, t.shape[3]), t.dtype) for part, t in parts]


def _states(index: int, layer: Any) -> list[Form]:
    """Forms of a layer's states; none for a layer that never gets one, which stands for one without attention."""
    forms: list[Form] = []
    for place in range(layer.number_of_states):
        parts = (("conv", layer.conv_states[place]), ("recurrent", layer.recurrent_states[place]))
        own = [Form(index, part, place, tuple(t.shape), t.dtype) for part, t in parts if t is not None]
        if own and not layer.has_previous_state[place]:
            raise InvalidRequest(
                f"layer {index} of this model keeps a state that its cache does not mark as filled; run this model "
                "without kvtier"
            )
        forms += own
    return forms


def _remembers(layer: Any) -> bool:
    """Whether its states still have tokens that were taken back: but one of a convolution that records its past is
    cropped."""
    return any(
        filled and (layer.recurrent_states[place] is not None or not layer.record_past)
        for place, filled in layer.has_previous_state.items()
    )


def _tensor(cache: Any, group: BoundaryGroup, form: Form, boundary: int) -> torch.Tensor | None:
    layer = cache.layers[form.layer]
    if not form.of_tokens:
        kept = layer.conv_states if form.part == "conv" else layer.recurrent_states
        state = kept[form.place]
        return None if state is None else state.detach().clone()
    tensor = getattr(layer, form.part)
    tokens = group.tokens(boundary)
    if tensor is None or layer.cumulative_length != boundary or tensor.shape[2] < tokens:
        return None
    window = tensor[:, :, tensor.shape[2] - tokens :].detach()
    # A pass over many tokens leaves a view of the keys of all of them, which the next pass lets go of.
    return window.clone() if window.untyped_storage().nbytes() > 2 * window.nbytes else window


def _cut(group: BoundaryGroup, boundary: int, flat: torch.Tensor) -> list[torch.Tensor]:
    """A group's tensors out of its bytes. Each is a copy: models write to states in place, and types need their
    alignment."""
    out, at, tokens = [], 0, group.tokens(boundary)
    for form in group.forms:
        size = form.bytes_at(tokens)
        out.append(flat[at : at + size].clone().view(form.dtype).view(form.shape_at(tokens)))
        at += size
    return out


def _release() -> str:
    """Of transformers, less the patch."""
    import transformers

    return ".".join(transformers.__version__.split(".")[:2])
