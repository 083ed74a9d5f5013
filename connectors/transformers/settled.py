"""What a model computes with beside the tokens: its weights, adapters, attention and autocast, as when it was opened.

All of it is in the namespace, or follows from it, and can be changed in place while a cache is open: by a step of
training, by PEFT's `set_adapter` and `disable_adapter`, by `set_attn_implementation`, by `torch.autocast`. KV from
before is not KV from behind.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

SAMPLED, SAMPLE_BYTES = 64, 256
"""Parameters, and bytes of each: new weights move all of them, and a step of training at the smallest rate some."""


class ModelAdapters:
    """The adapters that are attached to a model, by PEFT or by transformers."""

    def __init__(self, model: Any) -> None:
        """`now` looks at the layers that have adapters by now, and at which are active in the model."""
        self._model = model
        self._layers = [
            (name, layer)
            for name, layer in (model.named_modules() if _adapted(model) else ())
            if isinstance(getattr(layer, "disable_adapters", None), bool)
        ]

    def now(self) -> list[Any]:
        """What they do: which are active (a method of transformers' models, a property of PEFT's), and of each layer
        those that are, by what they are scaled, and whether they are off or merged. Empty without any."""
        if not _adapted(self._model):
            return []
        active = getattr(self._model, "active_adapters", [])
        layers = [
            [name, layer.disable_adapters, *(_plain(getattr(layer, part, None)) for part in _PARTS)]
            for name, layer in self._layers
        ]
        return [_plain(active() if callable(active) else active), layers]

    def hooks(self) -> list[list[int]]:
        """The hooks of each layer that has adapters. PEFT hands rows their own adapters (`adapter_names`) through one,
        for a single call."""
        return [list(layer._forward_pre_hooks) for _, layer in self._layers]


class Settled:
    """A model as it was when this was made."""

    def __init__(self, model: Any) -> None:
        self._model, self._adapters = model, ModelAdapters(model)
        self._were, self._hooks, self._precision = self._adapters.now(), self._adapters.hooks(), precision(model)
        self._attention = _attention_of(model)
        self._versions = [(weakref.ref(tensor), tensor._version) for tensor in _counted(model)]
        self._sampled = _drawn(model)
        self._samples = self._sample()

    def change(self) -> str:
        """What is different for a pass now, but for the weights; "" if nothing is."""
        if precision(self._model) != self._precision:
            return "under another autocast than the model was opened with"
        if _attention_of(self._model) != self._attention:
            return "with another attention implementation than the model was opened with"
        if self._adapters.now() != self._were or self._adapters.hooks() != self._hooks:
            return "with other adapters than the model was opened with"
        return ""

    def weights_changed(self) -> bool:
        """Whether parameters were written to in place, by their count of writes, or have other values in samples of
        them: writes to `.data` and in inference mode are not counted. Waits for the device."""
        counted = ((ref(), version) for ref, version in self._versions)
        if any(tensor is not None and tensor._version != version for tensor, version in counted):
            return True
        return any(sample != self._samples.get(name, sample) for name, sample in self._sample().items())

    def _sample(self) -> dict[str, bytes]:
        """SAMPLE_BYTES from the middle of each drawn parameter, by its name, in one copy per device. Those that are
        elsewhere, as offloading and sharding have it, are left out."""
        import torch

        by_device: dict[Any, dict[str, Any]] = {}
        for name in self._sampled:
            with contextlib.suppress(AttributeError):
                tensor = self._model.get_parameter(name).detach()
                end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
                if tensor.is_contiguous() and tensor.untyped_storage().nbytes() >= end and not tensor.is_meta:
                    flat = tensor.view(-1).view(torch.uint8)
                    start = max(0, flat.numel() - SAMPLE_BYTES) // 2
                    by_device.setdefault(tensor.device, {})[name] = flat[start : start + SAMPLE_BYTES]
        samples: dict[str, bytes] = {}
        for parts in by_device.values():
            raw, end = torch.cat(list(parts.values())).cpu().numpy().tobytes(), 0
            for name, part in parts.items():
                samples[name], end = raw[end : end + part.numel()], end + part.numel()
        return samples


def precision(model: Any) -> Any:
    """The autocast that holds now, for the model's device."""
    import torch

    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


_PARTS = ("merged", "active_adapters", "scaling")
"""What PEFT's layers say of themselves."""


def _attention_of(model: Any) -> Any:
    return getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)


def _adapted(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or hasattr(model, "peft_config")


def _plain(value: Any) -> Any:
    """A copy, which does not change with the layer."""
    if isinstance(value, dict):
        return sorted((str(name), str(part)) for name, part in value.items())
    return list(value) if isinstance(value, (list, tuple, set)) else value


def _drawn(model: Any) -> list[str]:
    """Names of up to SAMPLED parameters whose bytes can be looked at, the same of each model of this shape."""
    import torch

    plain = [name for name, parameter in model.named_parameters() if type(parameter) is torch.nn.Parameter]
    return random.Random(0).sample(plain, min(SAMPLED, len(plain)))


def _counted(model: Any) -> Iterator[Any]:
    """Parameters that count how often they were written to: those that were made in inference mode do not."""
    return (parameter for parameter in model.parameters() if not parameter.is_inference())
