"""Fingerprint of weights as an engine reads them: a stream of names and raw tensors.

    "w1:" + SHA-256 over the sorted digests of all tensors; each of its name, type, shape and bytes: all of them below
    64 KiB, or with mode "full", else 4 KiB at an offset drawn from its name

Names what was read, not what lies under a path by now. The order of the tensors does not count, since it depends on how
files are read.
"""

from __future__ import annotations

import hashlib
from typing import Any

STREAM = "w1:"
"""What these fingerprints begin with."""

_SAMPLE_BYTES = 4096
_WHOLE_TENSOR_BYTES = 65536


class StreamDigest:
    """Collects the tensors of one checkpoint. Not thread-safe."""

    def __init__(self, *, full: bool = False) -> None:
        self._full = full
        self._seen: list[bytes] = []

    def add(self, name: str, tensor: Any) -> None:
        """A torch tensor as it was read. Copies at most 4 KiB of a large one from its device, unless `full`."""
        import torch

        digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        size, width = flat.numel() * flat.element_size(), flat.element_size()
        if not self._full and size > _WHOLE_TENSOR_BYTES:
            drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            count = _SAMPLE_BYTES // width
            start = drawn % (flat.numel() - count)
            flat = flat[start : start + count]
        digest.update(memoryview(flat.contiguous().view(torch.uint8).cpu().numpy()))
        self._seen.append(digest.digest())

    def name(self) -> str:
        """The fingerprint of what was added; "" of nothing."""
        return f"{STREAM}{hashlib.sha256(b''.join(sorted(self._seen))).hexdigest()}" if self._seen else ""
