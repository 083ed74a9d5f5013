"""The device for the CUDA mover: streams, events, copies, kernels. One protocol, one implementation.

Calls go to the driver API through ctypes rather than to a runtime library: the batch copy exists only there,
and driver calls leave no "last error" that another library in the process would report as its own. Handles and
addresses are plain integers. Signatures and constants: CUDA driver API reference, cuda.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError
from kvtier.kernels.memory import bus_link
from kvtier.kernels.plan import Runs

SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600  # CUresult
_CAPTURING = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: a graph is being captured: no answer now
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_BATCH_ABI = 12080  # the version whose cuMemcpyBatchAsync has the nine arguments below
_SRC_ACCESS_ORDER_STREAM = 1
_HOST_PORTABLE_AND_MAPPED = 3  # for every context of the process, and for kernels


KERNELS = (*(f"kvtier_copy_{unit}" for unit in (16, 8, 4, 2, 1)), "kvtier_delay")
"""The kernels in copy.cu."""

log = logging.getLogger(__name__)

SOURCE, PTX = Path(__file__).parent / "copy.cu", Path(__file__).parent / "copy.ptx"
"""copy.cu for every GPU from sm_80 on and every driver from CUDA 12.0 on."""


class DeviceError(KVTierError):
    """The driver refused `call`; `code` is its CUresult. Never leaves this package."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: CUDA error {code}")
        self.call, self.code = call, code


class Driver(Protocol):
    """One device, from one thread. Everything but `reached` and the constructors is enqueued on a stream and returns
    at once. Raises DeviceError; a copy that raised may have been enqueued in part."""

    @property
    def current(self) -> AbstractContextManager[object]:
        """Around several calls: they ask only once for the device's context."""

    def stream(self, priority: int) -> int:
        """A new non-blocking stream; the lower the number, the sooner its kernels are scheduled."""

    def current_stream(self) -> int:
        """The caller's stream, on which the engine computes."""

    def event(self) -> int: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None:
        """Make work that is enqueued on `stream` from now on wait for the last record of `event`."""

    def reached(self, event: int) -> bool:
        """Whether the recorded work is over. Raises DeviceError when the device is in error."""

    def copy(self, runs: Runs, stream: int, *, pageable: bool = False) -> None:
        """Enqueue the runs; with `pageable` host memory among them this may wait for the stream."""

    def launch(self, kernel: str, ctas: int, threads: int, parameters: npt.NDArray[np.void], stream: int) -> None:
        """`parameters`: one record with a field for each of the kernel's, of their sizes, in order. It has been read on
        return."""

    def prepare(self, kernel: str) -> None:
        """Load a kernel ahead of its first launch; the driver compiles it for this GPU where it has not yet."""

    def device_memory(self, nbytes: int) -> int:
        """Address of new device memory, which lives until `close`. No pending work anywhere touches it."""

    def pinned_memory(self, nbytes: int) -> int:
        """Address of new page-locked host memory, which lives until `close`."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that kernels reach it under the same address. May take 0.1 s per GB."""

    def unregister(self, address: int) -> None: ...

    def close(self, streams: Sequence[int], events: Sequence[int]) -> None:
        """Release these and all memory; what the device refuses to release stays until the process ends, with a
        warning. Only when nothing enqueued is pending."""


class _Current(AbstractContextManager[None]):
    """Inside, the device's context is the thread's, whichever device the caller has chosen. May be nested: only the
    outermost asks the driver. Entering raises DeviceError."""

    def __init__(self, library: Any, context: ctypes.c_void_p) -> None:
        # Neither call waits for anything: called so, they keep the interpreter's lock, which beside a busy thread is
        # not had again for 5 ms.
        held = ctypes.PyDLL(library._name, handle=library._handle)
        self._push, self._pop = held.cuCtxPushCurrent_v2, held.cuCtxPopCurrent_v2
        self._push.argtypes = self._pop.argtypes = (ctypes.c_void_p,)
        self._context = context
        self._thread = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._thread, "depth", 0)
        if not depth and (code := self._push(self._context)) != SUCCESS:
            raise DeviceError("cuCtxPushCurrent_v2", code)
        self._thread.depth = depth + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.depth -= 1
        if not self._thread.depth:
            self._pop(ctypes.byref(ctypes.c_void_p()))


@cache
def _offsets(record: np.dtype[np.void]) -> npt.NDArray[np.uint64]:
    """Where the fields of a record lie, bytes."""
    assert record.fields is not None and record.names is not None
    return np.array([record.fields[name][1] for name in record.names], np.uint64)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the location hints concern managed memory only and stay zero."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location_type", ctypes.c_int),
        ("src_location_id", ctypes.c_int),
        ("dst_location_type", ctypes.c_int),
        ("dst_location_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDriverGetVersion": (ctypes.c_void_p,),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuStreamCreateWithPriority": (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy_v2": (ctypes.c_void_p,),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuEventCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuEventDestroy_v2": (ctypes.c_void_p,),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemHostAlloc": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemHostGetDevicePointer_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuModuleLoadData": (ctypes.c_void_p, ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
    "cuModuleUnload": (ctypes.c_void_p,),
    "cuLaunchKernel": (
        ctypes.c_void_p,
        *[ctypes.c_uint] * 7,  # grid, block, bytes of shared memory
        ctypes.c_void_p,  # stream
        ctypes.c_void_p,  # kernelParams
        ctypes.c_void_p,  # extra
    ),
    "cuGetProcAddress_v2": (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p),
}
_BATCH_SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # dsts
    ctypes.c_void_p,  # srcs
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # count
    ctypes.POINTER(_CopyAttributes),
    ctypes.POINTER(ctypes.c_size_t),  # attrsIdxs
    ctypes.c_size_t,  # numAttrs
    ctypes.POINTER(ctypes.c_size_t),  # failIdx
    ctypes.c_void_p,  # stream
)


class CudaDriver:
    """libcuda for device `ordinal`, in its primary context, which torch and CuPy use as well.

    `library` is the loaded libcuda.so.1. torch gives the current stream. CuPy compiles copy.cu for this GPU where it is
    installed, else the driver compiles copy.ptx; both cache that on disk. Raises DeviceError where the driver is too
    old, OSError without one.
    """

    def __init__(self, ordinal: int, library: Any = None) -> None:
        self.ordinal = ordinal
        self._lib = library if library is not None else ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, name, None)
            if function is None:
                raise DeviceError(f"{name}: not in this driver, CUDA 12 is needed", -1)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.current: AbstractContextManager[object] = _Current(self._lib, self._context)
        self._batch = self._find_batch()
        self._attributes = _CopyAttributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        self._first_index = ctypes.c_size_t(0)
        self._kernels: dict[str, int] = {}
        self._module = ctypes.c_void_p()
        self._compiled: Any = None  # CuPy's module
        self._device_memory: list[int] = []
        self._pinned_memory: list[int] = []

    @property
    def has_batch(self) -> bool:
        """Whether the driver copies many runs in one call (12.8 and later)."""
        return self._batch is not None

    @property
    def name(self) -> str:
        """Model and driver version."""
        text, version = ctypes.create_string_buffer(128), ctypes.c_int()
        self._call("cuDeviceGetName", text, len(text), self._device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return f"{text.value.decode('utf-8', 'replace')}, driver {version.value}"

    @property
    def scope(self) -> str:
        """What a measurement of copies holds for: model, driver, link and kernels."""
        link, kernels = bus_link(self.pci_bus_id()), hashlib.sha256(PTX.read_bytes()).hexdigest()[:12]
        return f"{self.name}, link {link or 'unknown'}, kernels {kernels}"

    def stream(self, priority: int) -> int:
        handle = ctypes.c_void_p()
        with self.current:
            self._call("cuStreamCreateWithPriority", ctypes.byref(handle), _STREAM_NON_BLOCKING, priority)
        return handle.value or 0

    def current_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.ordinal).cuda_stream)

    def event(self) -> int:
        handle = ctypes.c_void_p()
        with self.current:
            self._call("cuEventCreate", ctypes.byref(handle), _EVENT_DISABLE_TIMING)
        return handle.value or 0

    def record(self, event: int, stream: int) -> None:
        with self.current:
            self._call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self.current:
            self._call("cuStreamWaitEvent", stream, event, 0)

    def reached(self, event: int) -> bool:
        with self.current:
            code: int = self._lib.cuEventQuery(event)
        if code not in (SUCCESS, NOT_READY, _CAPTURING):
            raise DeviceError("cuEventQuery", code)
        return code == SUCCESS

    def copy(self, runs: Runs, stream: int, *, pageable: bool = False) -> None:
        """One batch where the driver has it, else one call per run."""
        if not len(runs):
            return
        with self.current:
            if self._batch is None or pageable:
                for dst, src, nbytes in zip(runs.dst.tolist(), runs.src.tolist(), runs.nbytes.tolist(), strict=True):
                    self._call("cuMemcpyAsync", dst, src, nbytes, stream)
                return
            # The driver has read the arrays when it returns; the copies themselves follow in stream order.
            dst, src, sizes = (np.ascontiguousarray(array) for array in (runs.dst, runs.src, runs.nbytes))
            failed = ctypes.c_size_t(0)
            code = self._batch(
                dst.ctypes.data,
                src.ctypes.data,
                sizes.ctypes.data,
                len(runs),
                ctypes.byref(self._attributes),
                ctypes.byref(self._first_index),
                1,
                ctypes.byref(failed),
                stream,
            )
            if code != SUCCESS:
                raise DeviceError("cuMemcpyBatchAsync", code)

    def launch(self, kernel: str, ctas: int, threads: int, parameters: npt.NDArray[np.void], stream: int) -> None:
        self.prepare(kernel)
        places = _offsets(parameters.dtype) + np.uint64(parameters.ctypes.data)
        with self.current:
            self._call(
                "cuLaunchKernel", self._kernels[kernel], ctas, 1, 1, threads, 1, 1, 0, stream, places.ctypes.data, None
            )

    def prepare(self, kernel: str) -> None:
        if kernel in self._kernels:
            return
        function = self._by_cupy(kernel)
        if not function:
            with self.current:
                if not self._module:
                    self._call("cuModuleLoadData", ctypes.byref(self._module), PTX.read_bytes())
                self._call("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode("ascii"))
        self._kernels[kernel] = function.value or 0

    def _by_cupy(self, kernel: str) -> ctypes.c_void_p:
        """The CUfunction of a kernel of copy.cu, NULL where CuPy is not installed or cannot compile it."""
        try:
            import cupy

            with cupy.cuda.Device(self.ordinal):
                if self._compiled is None:
                    source = SOURCE.read_text(encoding="ascii")
                    self._compiled = cupy.RawModule(code=source, options=("-std=c++17",), backend="nvrtc")
                return ctypes.c_void_p(int(self._compiled.get_function(kernel).kernel.ptr))
        except Exception as error:  # no CuPy, no compiler, a driver that is too old for either: the PTX is there
            log.debug("kernel %s is not compiled by CuPy: %s", kernel, error)
            return ctypes.c_void_p()

    def device_memory(self, nbytes: int) -> int:
        # Not from torch's allocator: its memory may still be in use by work queued on torch's stream.
        address = ctypes.c_uint64()
        with self.current:
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        self._device_memory.append(address.value)
        return address.value

    def pinned_memory(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        with self.current:
            self._call("cuMemHostAlloc", ctypes.byref(address), nbytes, _HOST_PORTABLE_AND_MAPPED)
        self._pinned_memory.append(address.value or 0)
        return address.value or 0

    def register(self, address: int, nbytes: int) -> None:
        mapped = ctypes.c_uint64()
        with self.current:
            self._call("cuMemHostRegister_v2", address, nbytes, _HOST_PORTABLE_AND_MAPPED)
            try:
                self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, 0)
                if mapped.value != address:
                    raise DeviceError("cuMemHostRegister_v2: the device has it at another address", -1)
            except DeviceError:
                self._call("cuMemHostUnregister", address)
                raise

    def unregister(self, address: int) -> None:
        with self.current:
            self._call("cuMemHostUnregister", address)

    def pci_bus_id(self) -> str:
        """Like "0000:1b:00.0"; names the device's directory in sysfs."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device)
        return text.value.decode("ascii").lower()

    def close(self, streams: Sequence[int], events: Sequence[int]) -> None:
        calls: list[tuple[str, Any]] = [("cuStreamDestroy_v2", stream) for stream in streams]
        calls += [("cuEventDestroy_v2", event) for event in events]
        calls += [("cuMemFree_v2", address) for address in self._device_memory]
        calls += [("cuMemFreeHost", address) for address in self._pinned_memory]
        calls += [("cuModuleUnload", self._module)] if self._module else []
        try:
            with self.current:
                refused = [error for name, what in calls if (error := self._refusal(name, what)) is not None]
        except DeviceError as error:  # not even the context is had
            refused = [error]
        self._device_memory, self._pinned_memory = [], []
        self._kernels, self._module = {}, ctypes.c_void_p()
        if (last := self._refusal("cuDevicePrimaryCtxRelease_v2", self._device)) is not None:
            refused.append(last)
        if refused:
            log.warning("the device did not release all that copies used: %s (%d calls)", refused[0], len(refused))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code != SUCCESS:
            raise DeviceError(name, code)

    def _refusal(self, name: str, *args: Any) -> DeviceError | None:
        try:
            self._call(name, *args)
        except DeviceError as error:
            return error
        return None

    def _find_batch(self) -> Any:
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._lib.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(address), _BATCH_ABI, 0, ctypes.byref(status)
        )
        return _BATCH_SIGNATURE(address.value) if code == SUCCESS and address.value else None
