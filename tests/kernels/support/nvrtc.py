"""NVIDIA's run-time compiler, from its wheel: it needs no driver and no GPU. As a program it writes kernels/copy.ptx.

Functions and options: NVRTC user guide.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "kernels"
SOURCE, PTX = KERNELS / "copy.cu", KERNELS / "copy.ptx"
FOLDER = "KVTIER_NVRTC"
"""Environment variable: a folder below which the library is looked for, in place of this environment's wheels."""


@dataclass(frozen=True)
class Compiled:
    code: int
    image: bytes
    log: str


def libraries() -> list[Path]:
    """Every NVRTC that is installed here."""
    spec = find_spec("nvidia")
    folders = [os.environ[FOLDER]] if os.environ.get(FOLDER) else list((spec and spec.submodule_search_locations) or ())
    found = {library for folder in folders for library in Path(folder).rglob("libnvrtc.so.*")}
    return sorted(found)


class Nvrtc:
    def __init__(self, library: Path) -> None:
        for part in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)  # it is looked for by name
        self._library = ctypes.CDLL(str(library))

    @property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        assert self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
        return major.value, minor.value

    def compile(self, source: bytes, architecture: str) -> Compiled:
        """A cubin for an architecture like "sm_90", PTX for one like "compute_80"."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        library, kind = self._library, "CUBIN" if architecture.startswith("sm_") else "PTX"
        assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"copy.cu", 0, None, None) == 0
        options = [b"-std=c++17", f"-arch={architecture}".encode()]
        code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        image = b""
        if code == 0:
            assert getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
            buffer = ctypes.create_string_buffer(size.value)
            assert getattr(library, f"nvrtcGet{kind}")(program, buffer) == 0
            image = buffer.raw
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return Compiled(code, image, log.value.decode())


def digest(source: bytes) -> str:
    """Of the source that a copy.ptx was made from: its first line names it."""
    return hashlib.sha256(source).hexdigest()


def main() -> None:
    """The oldest driver to be served must read the result, so the compiler has to be the oldest: CUDA 12.0's."""
    nvrtc = Nvrtc(libraries()[0])
    assert nvrtc.version == (12, 0), f"NVRTC 12.0 is needed, this is {nvrtc.version}: set {FOLDER} to its folder"
    source = SOURCE.read_bytes()
    done = nvrtc.compile(source, "compute_80")
    if done.code:
        sys.exit(done.log)
    PTX.write_bytes(f"// copy.cu {digest(source)}\n".encode() + done.image.rstrip(b"\0"))


if __name__ == "__main__":
    main()
