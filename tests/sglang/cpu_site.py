"""Lets SGLang run on a CPU beside a CPU build of torch. Import before sglang, in the main script of every process.

SGLang imports torchvision and, off CUDA, one function of vllm at module level, on paths that a text-only CPU run
never calls. What is not installed gets a stand-in here; what is installed stays.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


class _Anything:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StandIn(types.ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def _stand_in(*names: str) -> None:
    for name in names:
        module = _StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def _absent(name: str) -> bool:
    return sys.modules.get(name) is None and importlib.util.find_spec(name) is None


def install() -> None:
    """Put stand-ins where something is missing. Idempotent."""
    # Let transformers record that torchvision is absent before a stand-in makes it look present.
    from transformers.utils import import_utils

    for probe in ("is_torchvision_available", "is_torchvision_v2_available"):
        getattr(import_utils, probe, lambda: None)()
    if _absent("torchvision"):
        parts = ("", ".io", ".ops", ".transforms", ".transforms.functional")
        parts += (".transforms.v2", ".transforms.v2.functional")
        _stand_in(*(f"torchvision{part}" for part in parts))
    if "vllm" not in sys.modules:  # also where it is installed: an engine inside an engine's process helps nobody
        _stand_in("vllm", "vllm._custom_ops")


install()
