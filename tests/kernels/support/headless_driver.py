"""The CUDA driver over the stand-in for libcuda, without torch's CUDA."""

from __future__ import annotations

from kvtier.kernels.driver import CudaDriver


class HeadlessDriver(CudaDriver):
    """The caller computes on a stream of ours."""

    def current_stream(self) -> int:
        return 4242
