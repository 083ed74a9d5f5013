"""The kernels' source, built as C++ once per run; helpers of this folder are importable by name."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "support")]

from gpu_benchmarks import BENCHMARKS  # noqa: E402  (needs the line above)
from native_build import build  # noqa: E402


@pytest.fixture
def gpu_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of `make gpu-check` are importable by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="session")
def kernel_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as a shared object: run_copy and run_delay."""
    library = ctypes.CDLL(
        str(build(HERE / "support" / "shim.cpp", tmp_path_factory.mktemp("shim") / "kernels.so", "-shared", "-fPIC"))
    )
    library.run_copy.argtypes = (
        ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    library.run_delay.argtypes = (ctypes.c_uint64,)
    return library


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A stand-in for the driver's library, whose kernels are the real ones."""
    path = tmp_path_factory.mktemp("fake") / "libcuda.so"
    library = ctypes.CDLL(str(build(HERE / "support" / "fakecuda.cpp", path, "-shared", "-fPIC")))
    library.fake_calls.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="session")
def kernel_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """The kernels as a program under the address and undefined-behaviour sanitizers, fed with cases on its stdin."""
    folder = tmp_path_factory.mktemp("sanitized")
    program = build(
        HERE / "support" / "shim.cpp",
        folder / "kernels",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    )
    with pytest.MonkeyPatch.context() as patch, (folder / "report").open("wb") as report:
        patch.delenv("LD_PRELOAD", raising=False)  # vLLM sets it in its process; the sanitizer must come first
        process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=report)
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 0, (folder / "report").read_text()
