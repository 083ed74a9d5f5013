"""The kernels' source: compiles for every supported GPU, and, as plain C++, touches the right bytes and no others."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from geometry import Problem, byte_addresses, problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvrtc import PTX, SOURCE, Nvrtc, digest, libraries

from kvtier.kernels.copy_kernel import ITEMS
from kvtier.kernels.driver import KERNELS
from kvtier.kernels.grid import MAX_UNITS, UNIT_BYTES, Grid, grid_of
from kvtier.kernels.layout import Order, Paged, Shape, of_slots, of_tensors


@pytest.fixture(scope="session", params=libraries() or [None], ids=lambda path: path.name if path else "none")
def nvrtc(request: pytest.FixtureRequest) -> Nvrtc:
    """Each of NVIDIA's run-time compilers that is installed here."""
    if request.param is None:
        if os.environ.get("CI"):
            pytest.fail("the wheel nvidia-cuda-nvrtc is needed to compile the kernels")
        pytest.skip("no nvidia-cuda-nvrtc here: the kernels cannot be compiled")
    return Nvrtc(request.param)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_every_kernel_compiles_to_a_cubin(nvrtc: Nvrtc, architecture: str) -> None:
    if nvrtc.version < (12, 8) and architecture in ("sm_100", "sm_120"):
        pytest.skip("this compiler is older than the GPU: the driver compiles copy.ptx for it")
    done = nvrtc.compile(SOURCE.read_bytes(), architecture)
    assert done.code == 0 and not done.log.strip("\0\n "), done.log
    assert done.image.startswith(b"\x7fELF")
    assert list(KERNELS) == [*(f"kvtier_copy_{unit}" for unit in UNIT_BYTES), "kvtier_delay"]
    for name in KERNELS:
        assert f".text.{name}".encode() in done.image


def test_a_wrong_source_does_not_compile(nvrtc: Nvrtc) -> None:
    done = nvrtc.compile(SOURCE.read_bytes().replace(b"u64 rest", b"").replace(b"u32 rest", b""), "sm_90")
    assert done.code != 0 and "rest" in done.log


def test_the_compiled_kernels_are_of_this_source() -> None:
    first, text = PTX.read_text(encoding="ascii").split("\n", 1)
    assert first == f"// copy.cu {digest(SOURCE.read_bytes())}", "copy.cu was changed: make ptx"
    assert ".version 8.0\n.target sm_80\n" in text, "for every driver from CUDA 12.0 and every GPU from sm_80 on"
    assert all(f".visible .entry {name}(" in text for name in KERNELS) and ".local" not in text
    assert f"param_13[{8 * ITEMS}]" in text and f"#define KVTIER_ITEMS {ITEMS}\n" in SOURCE.read_text(encoding="ascii")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_compiled_kernels_assemble_without_spills(architecture: str) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas here: the driver's is the same, but needs a GPU")
    command = [ptxas, f"-arch={architecture}", "-v", str(PTX), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 bytes spill stores, 0 bytes spill loads") == len(KERNELS)
    assert max(int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)) <= 48


class Packed:
    """A paged memory's regions, laid one after another in a buffer, each at its address modulo a page."""

    def __init__(self, paged: Paged) -> None:
        self._starts = np.array([region.start for region in paged.regions], dtype=np.uint64)
        offsets, end = [], 0
        for region in paged.regions:
            offsets.append(end + (region.start - end) % 4096)
            end = offsets[-1] + region.nbytes
        self._offsets = np.array(offsets, dtype=np.uint64)
        self.nbytes = end

    def place(self, addresses: np.ndarray) -> np.ndarray:
        """Offsets in the buffer of addresses in the regions."""
        home = np.searchsorted(self._starts, addresses, side="right") - 1
        return (addresses - self._starts[home] + self._offsets[home]).astype(np.uint64)


def run_case(
    process: subprocess.Popen[bytes],
    grid: Grid,
    ends: tuple[Paged, Paged],
    items: tuple[np.ndarray, np.ndarray],
    data: tuple[bytes, bytes],
    ctas: int,
    threads: int,
) -> bytes:
    """The destination's bytes after the kernel ran over `data`, in the sanitized process."""
    src, dst = ends
    bases = [Packed(end).place(end.bases.ravel()) for end in ends]
    head = [
        grid.unit_bytes, ctas, threads, len(items[0]), grid.planes, grid.outer.count, grid.inner.count, grid.row_bytes,
        src.stride, dst.stride, grid.outer.src, grid.outer.dst, grid.inner.src, grid.inner.dst,
        len(data[0]), len(data[1]),
    ]  # fmt: skip
    message = struct.pack("<16Q", *head)
    message += b"".join(np.asarray(table, np.uint64).tobytes() for table in bases)
    message += b"".join(np.asarray(table, np.uint32).tobytes() for table in items) + data[0] + data[1]
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(message)
    process.stdin.flush()
    return process.stdout.read(len(data[1]))


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems(), store=st.booleans(), ctas=st.integers(1, 3), threads=st.sampled_from([1, 7, 32]))
def test_the_kernel_copies_every_byte_and_touches_no_other(
    kernel_process: subprocess.Popen[bytes], problem: Problem, store: bool, ctas: int, threads: int
) -> None:
    device, host = (problem.device, problem.blocks), (problem.host, problem.slots)
    (src, src_items), (dst, dst_items) = (device, host) if store else (host, device)
    grid = grid_of(src, dst, problem.shape, dense=problem.host)
    rng = np.random.default_rng(len(src_items) * 7 + problem.shape.block_bytes)
    packed = Packed(src), Packed(dst)
    data = tuple(rng.integers(0, 256, end.nbytes, dtype=np.uint8) for end in packed)
    expected = data[1].copy()
    froms = packed[0].place(byte_addresses(src, problem.shape, src_items).ravel())
    expected[packed[1].place(byte_addresses(dst, problem.shape, dst_items).ravel())] = data[0][froms]
    got = run_case(
        kernel_process, grid, (src, dst), (src_items, dst_items), (data[0].tobytes(), data[1].tobytes()), ctas, threads
    )
    assert len(got) == len(expected), "the sanitizer stopped the kernel"
    assert got == expected.tobytes()


def test_the_sanitizer_sees_one_byte_too_far(kernel_process: subprocess.Popen[bytes]) -> None:
    """The negative control, in a process of its own: the destination is one byte shorter than what is copied."""
    program = str(kernel_process.args[0])  # type: ignore[index]
    message = struct.pack("<16Q", 1, 1, 8, 1, 1, 1, 1, 64, 64, 64, 0, 0, 0, 0, 64, 63)
    message += struct.pack("<2Q2I", 0, 0, 0, 0) + bytes(64 + 63)
    done = subprocess.run([program], input=message, capture_output=True, timeout=60)
    assert done.returncode != 0 and b"heap-buffer-overflow" in done.stderr
    fits = (
        struct.pack("<16Q", 1, 1, 8, 1, 1, 1, 1, 64, 64, 64, 0, 0, 0, 0, 64, 64)
        + bytes(24)
        + bytes(range(64))
        + bytes(64)
    )
    done = subprocess.run([program], input=fits, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout == bytes(range(64))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems())
def test_units_divide_every_address(problem: Problem) -> None:
    grid = grid_of(problem.device, problem.host, problem.shape, dense=problem.host)
    for paged, items in ((problem.device, problem.blocks), (problem.host, problem.slots)):
        starts = paged.bases.ravel()[:, None] + items.astype(np.uint64) * np.uint64(paged.stride)
        assert (starts % np.uint64(grid.unit_bytes) == 0).all()
    for axis in (grid.outer, grid.inner):
        assert axis.src % grid.unit_bytes == 0 and axis.dst % grid.unit_bytes == 0
    covered = grid.planes * grid.outer.count * grid.inner.count * grid.row_bytes
    assert covered == problem.shape.block_bytes and grid.row_bytes % grid.unit_bytes == 0


def test_equal_layouts_walk_long_rows_in_wide_units() -> None:
    shape = Shape(layers=2, kv=2, tokens=16, heads=8, channels=128, element_bytes=2)
    plane = 16 * 8 * 256
    bases = np.arange(4, dtype=np.uint64).reshape(2, 2) * np.uint64(plane) + np.uint64(1 << 30)
    nhd = Paged(bases, 4, 4 * plane, token=8 * 256, head=256, regions=())
    hnd = Paged(bases, 4, 4 * plane, token=256, head=16 * 256, regions=())
    same = grid_of(nhd, nhd.at(bases, 4, 4 * plane, ()), shape, dense=nhd)
    assert (same.row_bytes, same.outer.count, same.inner.count, same.unit_bytes) == (plane, 1, 1, 16)
    turned = grid_of(nhd, hnd, shape, dense=hnd)
    assert (turned.row_bytes, turned.unit_bytes) == (256, 16)
    assert (turned.inner.dst, turned.inner.count) == (256, 16), "the host's order is walked innermost"
    assert turned.max_items * turned.units(1) <= MAX_UNITS


ENGINES = {
    "vLLM LBNHC": ("LBNHC", 1),
    "vLLM LBHNC": ("LBHNC", 1),
    "vLLM BLNHC": ("BLNHC", 1),
    "vLLM BLHNC": ("BLHNC", 1),
    "K and V in one tensor": ("LKBNHC", 2),
    "SGLang, K and V apart": ("BNHC", 2),
}
UNITS_BY_CHANNELS = {16: 16, 8: 8, 4: 4, 2: 2, 1: 1}  # channels of one byte each: the widest unit that divides them


@pytest.mark.parametrize("channels", UNITS_BY_CHANNELS)
@pytest.mark.parametrize("element_bytes", [1, 2], ids=["fp8", "halves"])
@pytest.mark.parametrize("name", ENGINES)
def test_every_kernel_in_every_engines_layout(
    kernel_process: subprocess.Popen[bytes], name: str, element_bytes: int, channels: int
) -> None:
    """Every width of load over the layouts of vLLM and SGLang, in buffers of exactly their size. The host's slots have
    heads before tokens, so that no axis but the channels continues a row where the device has tokens first."""
    dims, kv = ENGINES[name]
    shape = Shape(layers=3, kv=kv, tokens=4, heads=3, channels=channels, element_bytes=element_bytes)
    extents = {"L": 3, "K": kv, "B": 5, "N": 4, "H": 3, "C": channels}
    dtype = {1: torch.uint8, 2: torch.float16}[element_bytes]

    def tensor() -> torch.Tensor:
        return torch.zeros([extents[axis] for axis in dims], dtype=dtype)

    tensors: list[Any] = [tensor()] if "L" in dims else [(tensor(), tensor()) for _ in range(3)]
    device = of_tensors(tensors, dims, shape)
    arena = np.zeros(6 * shape.block_bytes + 4096, np.uint8)
    start = -arena.ctypes.data % 4096
    host = of_slots(memoryview(arena[start : start + 6 * shape.block_bytes]), shape.block_bytes, shape, Order.HND)
    blocks, slots = np.array([4, 0, 2]), np.array([1, 5, 3])
    for (src, dst), (froms, tos) in (((device, host), (blocks, slots)), ((host, device), (slots, blocks))):
        grid = grid_of(src, dst, shape, dense=host)
        packed = Packed(src), Packed(dst)
        data = tuple(np.random.default_rng(channels).integers(0, 256, end.nbytes, dtype=np.uint8) for end in packed)
        expected = data[1].copy()
        read = packed[0].place(byte_addresses(src, shape, froms).ravel())
        expected[packed[1].place(byte_addresses(dst, shape, tos).ravel())] = data[0][read]
        raw = data[0].tobytes(), data[1].tobytes()
        assert run_case(kernel_process, grid, (src, dst), (froms, tos), raw, 2, 32) == expected.tobytes()
        if "NH" in dims and element_bytes == 1:
            assert grid.unit_bytes == UNITS_BY_CHANNELS[channels]
