"""The stores that are compared, and an environment of its own for each of them.

A peer is installed as its documents have it for a CPU: releases by version, no sources changed. What a release's wheel
declares but a CPU run never imports (CUDA packages) is left out with --no-deps.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.testing.child import Child

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
START_S = 180.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contender:
    """A store. `installs` are the arguments of pip, one call each; none: it runs in this interpreter."""

    name: str
    program: str
    about: str
    arguments: tuple[str, ...] = ()
    installs: tuple[tuple[str, ...], ...] = ()
    in_files: bool = True  # blocks are in files, and a new process finds them
    names_blocks: bool = True  # it, and not its caller, says which blocks are the same
    before: tuple[str, ...] = ()  # a command that runs it, such as strace

    def python(self, environments: Path, say: Callable[[str], None]) -> Path:
        """An interpreter that has it: made below `environments` unless one with the same packages is there. Runs pip;
        raises CalledProcessError."""
        if not self.installs:
            return Path(sys.executable)
        named = hashlib.sha256(repr(self.installs).encode()).hexdigest()[:12]
        home = environments / f"{self.program}-{named}"
        python, ready = home / "bin" / "python", home / "ready"
        if not ready.exists():
            say(f"{self.name}: installing")
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
            for packages in self.installs:
                subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, cwd=ROOT)
            ready.touch()
        return python

    def start(self, python: Path) -> Child:
        """Its program, which reads orders (see serve.py). Raises ChildFailed."""
        ours = [str(HERE)]
        if not self.installs:
            ours += [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        program = str(HERE / "stores" / f"{self.program}_store.py")
        settings = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
        command = [
            "env",
            *settings,
            f"PYTHONPATH={':'.join(ours)}",
            *self.before,
            str(python),
            program,
            *self.arguments,
        ]
        return Child(command, START_S)


_TORCH = ("torch==2.13.0", "numpy==2.3.5")
_VLLM = (("--no-deps", "-r", "constraints.txt"), ("--no-deps", "-r", "requirements-vllm.txt"))
_LMCACHE_ITSELF = ("--no-deps", "lmcache==0.5.6", "nixl==1.5.1", "nixl-cu12==1.5.1")
_LMCACHE = (
    "aiofile", "aiofiles", "aiohttp", "awscrt", "blake3", "cachetools", "cryptography", "msgspec", "numba",
    "prometheus_client", "psutil", "py-cpuinfo", "pyyaml", "pyzmq", "requests", "sortedcontainers", "transformers",
)  # fmt: skip

CONTENDERS: Sequence[Contender] = (
    Contender("kvtier G3", "kvtier", "G2 and G3, as a connector opens them", arguments=("g3",)),
    Contender("kvtier G4", "kvtier", "G2 and a folder of objects as G4", arguments=("g4",)),
    Contender(
        "vLLM fs", "vllm", "vLLM's file system tier (FileSystemTierManager)",
        installs=_VLLM,
    ),
    Contender(
        "LMCache", "lmcache", "LMCache's L2 adapter fs_native with O_DIRECT",
        installs=((*_TORCH, *_LMCACHE), _LMCACHE_ITSELF),
    ),
    Contender(
        "SGLang file", "sglang", "SGLang's file storage below HiCache (HiCacheFile)",
        arguments=(str(ROOT / "kvtier" / "testing" / "sglang_cpu.py"),),
        installs=(*_VLLM, ("--no-deps", "-r", "requirements-sglang.txt")),
    ),
    Contender(
        "Mooncake", "mooncake", "Mooncake Store: a master and one client that lends memory (needs libibverbs.so.1)",
        installs=(("mooncake-transfer-engine-non-cuda==0.3.13.post1",),),
        in_files=False, names_blocks=False,
    ),
    Contender(
        "NIXL POSIX", "nixl", "NIXL's POSIX backend, a file per block, read with io_uring or AIO",
        installs=(("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1", "numpy==2.3.5"),),
        names_blocks=False,
    ),
)  # fmt: skip
"""FlexKV publishes no wheel, and is not here."""

ENGINE_WITH_LMCACHE = Contender(
    "vLLM with LMCache", "vllm-lmcache", "of the contest of engines: vLLM's packages, and LMCache's beside them",
    installs=(*_VLLM, ("-c", "constraints.txt", *_LMCACHE, "fastapi", "httpx", "uvicorn"), _LMCACHE_ITSELF),
)  # fmt: skip
