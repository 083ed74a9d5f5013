"""Lets SGLang run on a CPU beside a CPU build of torch: stands in for what it imports and never calls there.

    from kvtier.testing import sglang_cpu

    sglang_cpu.install()     at module level of the main script, before sglang: every child process repeats that

SGLang imports torchvision, triton (1 GB) and, off CUDA, one function of vllm at module level, on paths that a text-only
CPU run never calls. Installed packages are left as they are. HiCache calls CUDA for page-locking its host pool and for
copies; the copy of `hicache_io_backend="direct"` with `hicache_mem_layout="layer_first"` is done here with torch. Hide
GPUs from the process (CUDA_VISIBLE_DEVICES=) where there are some.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any


def _none(name: str) -> bool:
    """Names that a stand-in lacks: Python's own, and triton's driver, since there is no device."""
    return name.startswith("__") or name == "driver"


class _Anything:
    """Whatever is done with it, nothing happens; as a decorator it leaves functions as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> Any:
        if _none(name):
            raise AttributeError(name)
        return _Anything()


class _StandIn(types.ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if _none(name):
            raise AttributeError(name)
        return type(name, (_Anything,), {}) if name[0].isupper() else _Anything()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of the packages that are missing."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _absent(name: str) -> bool:
    return sys.modules.get(name) is None and importlib.util.find_spec(name) is None


def install() -> None:
    """Put stand-ins where something is missing. Idempotent."""
    if any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        return
    # Let transformers record that torchvision is absent before a stand-in makes it look present.
    from transformers.utils import import_utils

    for probe in ("is_torchvision_available", "is_torchvision_v2_available"):
        getattr(import_utils, probe, lambda: None)()
    packages = {name for name in ("torchvision", "triton") if _absent(name)}
    if "vllm" not in sys.modules:  # also where it is installed: no second engine in this process
        packages.add("vllm")
    sys.meta_path.insert(0, _StandIns(packages))
    _install_hicache()


def _install_hicache() -> None:
    """SGLang looks the copy up as a global that it imports only on CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    builtins.transfer_kv_direct = _transfer_kv_direct  # type: ignore[attr-defined]
    done = SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetErrorString=lambda _: ""
    )
    torch.cuda.cudart = lambda: done
    zeros = torch.zeros
    torch.zeros = wraps(zeros)(lambda *shape, pin_memory=False, **named: zeros(*shape, **named))
    tensor = torch.tensor
    torch.tensor = wraps(tensor)(lambda data, pin_memory=False, **named: tensor(data, **named))
    torch.Tensor.pin_memory = lambda self, *_: self


def _transfer_kv_direct(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.to(target.device)] = source[src_indices.to(source.device)]
