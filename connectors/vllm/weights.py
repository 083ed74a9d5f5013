"""What a vLLM worker computes with: watched where weights and adapters are loaded, by hooks into vLLM's classes.

    loader's stream       names the checkpoint that was read, from names and raw tensors
    worker's updates      reload_weights, update_weights, …: a new epoch, and a new name if a stream was read meanwhile
    adapters              named when they are loaded, by their files

Blocks belong to an epoch: a worker fails loads and drops stores of another one, and tells the scheduler with its next
answer. The plug-in installs the hooks before weights are loaded; else the connector does, so that only the name of the
first checkpoint is read from its files instead. One worker per process is watched, as vLLM has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from kvtier.connectors.adapters import named_while
from kvtier.identity.stream import StreamDigest

_CLAIMS_MAX = 1024


class WeightsWatch:
    """State of one worker's weights. Used from the worker's one model thread."""

    def __init__(self) -> None:
        self.epoch = 0
        self.weights = ""  # fingerprint of what was read last; "": nothing told
        self.adapters: dict[int, str] = {}  # by id; "" where the files changed meanwhile, or since an earlier load
        self._streams: list[str] = []

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The engine loads its weights for the first time."""
        self._streams = []
        yield
        self._settle()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Weights change in place. What was named before does not hold from the first moment on."""
        self.epoch += 1
        self._streams, self.weights = [], ""
        try:
            yield
        finally:
            self.epoch += 1
            self._settle()

    def read(self, stream: Iterator[tuple[str, Any]], *, full: bool, whole: bool = True) -> Iterator[tuple[str, Any]]:
        """Pass a checkpoint's stream on, and name it when it has ended. One that is left before its end, or is not
        `whole`, has no name, nor have weights of which it is a part."""
        streams, place = self._streams, len(self._streams)
        streams.append("")
        digest = StreamDigest(full=full)
        for name, tensor in stream:
            digest.add(name, tensor)
            yield name, tensor
        streams[place] = digest.name() if whole else ""

    def _settle(self) -> None:
        names = self._streams
        self.weights = "+".join(names) if names and all(names) else ""

    def adapter(self, number: int, name: str) -> None:
        """An adapter was loaded under this id."""
        known = self.adapters.get(number, name)
        self.adapters[number] = name if known == name else ""


class AdapterClaims:
    """Loaded blocks of adapters that may turn out to be others: an adapter is loaded when a request of it runs first,
    and its blocks may be copied in before. Used from the worker's one model thread."""

    def __init__(self, watch: WeightsWatch) -> None:
        self._watch = watch
        self._open: list[tuple[int, str, tuple[int, ...]]] = []

    def right(self, adapter: int, name: str, blocks: tuple[int, ...]) -> bool:
        """Whether blocks under this name are the adapter's, as far as is known by now; `settle` tells of the rest. Of
        more than can be remembered until then, nothing is taken for right."""
        known = self._watch.adapters.get(adapter)
        if known is None and len(self._open) < _CLAIMS_MAX:
            self._open.append((adapter, name, blocks))
            return True
        return known == name

    def settle(self) -> set[int]:
        """Blocks that are another adapter's after all, since the last call."""
        loaded = self._watch.adapters
        bad = {block for number, name, blocks in self._open if loaded.get(number, name) != name for block in blocks}
        self._open = [claim for claim in self._open if claim[0] not in loaded]
        return bad


_current = WeightsWatch()


def watched() -> WeightsWatch:
    """What is watched in this process."""
    return _current


def _load_model(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
    global _current
    _current = WeightsWatch()
    with _current.loading():
        return original(worker, *arguments, **named)


def _change(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
    with _current.changing():
        return original(worker, *arguments, **named)


def _stream(original: Callable[..., Any], loader: Any, *arguments: Any, **named: Any) -> Any:
    experts = getattr(loader, "local_expert_ids", None)  # the rank's own, where it leaves the others unread
    return _current.read(original(loader, *arguments, **named), full=_full, whole=experts is None)


def _load_adapter(original: Callable[..., Any], manager: Any, request: Any, *arguments: Any, **named: Any) -> Any:
    folder = _adapter_folder(request)
    loaded, name = named_while(folder, lambda: original(manager, request, *arguments, **named))
    _current.adapter(request.lora_int_id, name)
    return loaded


def _adapter_folder(request: Any) -> Path:
    try:
        found = resolve_name("vllm.lora.utils:get_adapter_absolute_path")(request.lora_path)
    except Exception:
        found = request.lora_path
    return Path(str(found))


_full = False


def read_all_bytes() -> None:
    """From now on streams are named by all of their bytes (`weights: full`)."""
    global _full
    _full = True


_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (_WORKER, "load_model", _load_model),
    *(
        (_WORKER, method, _change)
        for method in (
            "reload_weights", "update_config", "start_weight_update", "start_draft_weight_update", "update_weights",
            "finish_weight_update",
        )
    ),
    ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "reload_weights", _change),
    ("vllm.model_executor.model_loader.default_loader:DefaultModelLoader", "get_all_weights", _stream),
    ("vllm.model_executor.model_loader.runai_streamer_loader:RunaiModelStreamerLoader", "get_all_weights", _stream),
    ("vllm.lora.worker_manager:WorkerLoRAManager", "_load_adapter", _load_adapter),
)  # fmt: skip
_MARK = "_kvtier_hook"


def install() -> list[str]:
    """Put the hooks in place that this release has room for, once per process. Returns those that it lacks."""
    missing = []
    for owner, method, hook in _HOOKS:
        try:
            kind = resolve_name(owner)
        except Exception:  # a part of vLLM that does not import here
            missing.append(f"{owner}.{method}")
            continue
        original = vars(kind).get(method)
        if original is None:
            missing.append(f"{owner}.{method}")
        elif not hasattr(original, _MARK):
            setattr(kind, method, _hooked(original, hook))
    return missing


def _hooked(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    setattr(call, _MARK, True)
    return call
