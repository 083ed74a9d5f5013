"""What is written down of the driver's interface against NVIDIA's own header: sizes, layouts, constants, arguments."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvtier.kernels import driver

CONSTANTS = {
    "CUDA_SUCCESS": driver.SUCCESS,
    "CUDA_ERROR_OUT_OF_MEMORY": driver.OUT_OF_MEMORY,
    "CUDA_ERROR_NOT_READY": driver.NOT_READY,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": driver._CAPTURING,
    "CU_STREAM_NON_BLOCKING": driver._STREAM_NON_BLOCKING,
    "CU_EVENT_DISABLE_TIMING": driver._EVENT_DISABLE_TIMING,
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": driver._SRC_ACCESS_ORDER_STREAM,
    "(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)": driver._HOST_PORTABLE_AND_MAPPED,
    "(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)": driver._HOST_PORTABLE_AND_MAPPED,
    "CU_GET_PROC_ADDRESS_DEFAULT": 0,
}
FIELDS = {
    "srcAccessOrder": driver._CopyAttributes.src_access_order,
    "srcLocHint": driver._CopyAttributes.src_location_type,
    "dstLocHint": driver._CopyAttributes.dst_location_type,
    "flags": driver._CopyAttributes.flags,
}
LOCATION = {"type": 0, "id": ctypes.sizeof(ctypes.c_int)}


@pytest.fixture(scope="session")
def include() -> Path:
    """The folder of cuda.h: a CUDA toolkit's, or that of the wheel nvidia-cuda-runtime."""
    spec = find_spec("nvidia")
    places = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    found = [path for place in places for path in sorted(place.rglob("cuda.h"))]
    found += sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    if not found or shutil.which("g++") is None:
        if os.environ.get("CI"):
            pytest.fail("g++ and the wheel nvidia-cuda-runtime are needed to check the driver's interface")
        pytest.skip("no cuda.h or no g++ here: install nvidia-cuda-runtime")
    return found[0].parent


def arguments(types: tuple[Any, ...]) -> str:
    """The sizes of a function's parameters, and which of them are integers, as a C++ initializer."""
    return "{" + ", ".join(str(ctypes.sizeof(kind)) for kind in types) + "}"


def program() -> str:
    lines = [
        "#define __CUDA_API_VERSION_INTERNAL  // every version of a function under its own name",
        "#include <cuda.h>",
        "#include <array>",
        "#include <cstddef>",
        "template <typename... A> constexpr std::array<size_t, sizeof...(A)> sizes(CUresult (*)(A...))",
        "{ return {sizeof(A)...}; }",
        "template <size_t N> constexpr bool same(std::array<size_t, N> a, std::array<size_t, N> b)",
        "{ for (size_t i = 0; i < N; ++i) if (a[i] != b[i]) return false; return true; }",
    ]
    lines += [f'static_assert({name} == {value}, "{name}");' for name, value in CONSTANTS.items()]
    lines.append(f'static_assert(sizeof(CUmemcpyAttributes) == {ctypes.sizeof(driver._CopyAttributes)}, "size");')
    lines += [f'static_assert(offsetof(CUmemcpyAttributes, {n}) == {f.offset}, "{n}");' for n, f in FIELDS.items()]
    lines += [f'static_assert(offsetof(CUmemLocation, {n}) == {offset}, "{n}");' for n, offset in LOCATION.items()]
    functions = dict(driver._SIGNATURES)
    functions["cuMemcpyBatchAsync"] = driver._BATCH_SIGNATURE._argtypes_
    for name, types in functions.items():
        count = len(types)
        lines.append(f'static_assert(same<{count}>(sizes((decltype(&{name}))nullptr), {arguments(types)}), "{name}");')
    return "\n".join(lines) + "\n"


def compiles(include: Path, source: str) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{include}", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=100)


def test_the_drivers_interface_is_as_nvidias_header_says(include: Path) -> None:
    done = compiles(include, program())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("CUDA_ERROR_NOT_READY == 600", "CUDA_ERROR_NOT_READY == 601"),
        ("&cuMemcpyBatchAsync", "&cuMemcpyBatchAsync_v2"),  # the one of CUDA 13, which has an argument fewer
        ("cuMemcpyAsync))nullptr), {8, 8, 8, 8}", "cuMemcpyAsync))nullptr), {8, 8, 4, 8}"),
    ],
)
def test_a_wrong_interface_is_seen(include: Path, what: str, instead: str) -> None:
    assert what in program()
    assert compiles(include, program().replace(what, instead)).returncode != 0
