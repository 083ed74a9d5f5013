"""The LoRA adapters that this SGLang process has loaded, by SGLang's id of each.

An id says where an adapter lies (of `--lora-paths` it is a digest of name and path), not what its files hold: that is
named when they are loaded, and is part of a request's scope.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvtier.connectors.adapters import adapter_name, named_while
from kvtier.connectors.configuration import digest16

_loaded: dict[str, str] = {}
_public: dict[str, str] = {}


def load(original: Callable[..., Any], manager: Any, ref: Any, *arguments: Any, **named: Any) -> Any:
    """Around LoRAManager._load_lora_adapter."""
    done, name = named_while(_folder(ref.lora_path), lambda: original(manager, ref, *arguments, **named))
    _loaded[ref.lora_id] = name
    _publish(ref)
    return done


def remember(refs: Iterable[Any] | None) -> None:
    """Name the adapters that were loaded before anybody watched, by their files as they are."""
    for ref in refs or ():
        if getattr(ref, "lora_id", None) is not None and ref.lora_id not in _loaded:
            _loaded[ref.lora_id] = adapter_name(_folder(ref.lora_path))
            _publish(ref)


def name_of(number: str) -> str:
    """The name of an adapter; "" where nothing names its weights."""
    return _loaded.get(number, "")


def public_name(number: str) -> str | None:
    """The name by which requests ask for an adapter; None where it is not known."""
    return _public.get(number)


def _publish(ref: Any) -> None:
    if name := getattr(ref, "lora_name", None):
        _public[ref.lora_id] = name


def name_of_all(refs: Iterable[Any] | None) -> str:
    """One name of all these adapters; of this process alone where one of them has none."""
    names = [(ref.lora_id, name_of(ref.lora_id)) for ref in refs or ()]
    return digest16(sorted(names)) if all(name for _, name in names) else secrets.token_hex(8)


def _folder(path: str) -> Path:
    """The directory of an adapter's files; of a hub adapter, the snapshot in the local cache."""
    folder = Path(path)
    if folder.exists():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "adapter_config.json")
    except Exception:  # a foreign library's errors are not part of its contract
        return folder
    return Path(found).parent if isinstance(found, str) else folder
