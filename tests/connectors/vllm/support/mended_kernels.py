"""What vLLM's kernels of Mamba 2 lack on CPUs: states at the ends of chunks, and checkpoints.

With prefix caching vLLM asks for both (`return_intermediate_states`, `store_prefill_checkpoint`). Its CPU kernel
answers with the states at the ends of the sequences, which is an IndexError in the mixer, and the other one is written
in Triton. Here the CPU kernel is called chunk by chunk, and the checkpoint is copied with torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def mend_mamba2() -> None:
    """For engines of this process, before they load their model."""
    import torch
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    plain = ssd_combined._mamba_chunk_scan_combined_fwd

    def by_chunks(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, out: Any, **more: Any) -> Any:
        if not more.pop("return_intermediate_states", False):
            return plain(x, dt, A, B, C, chunk_size, out, **more)
        ends, rows = more.pop("cu_chunk_seqlens").tolist(), more.pop("seq_idx").tolist()
        more.pop("cu_seqlens")
        initial, z = more.pop("initial_states"), more.pop("z")
        states: list[Any] = []
        for number, (begin, end) in enumerate(pairwise(ends)):
            cut, row = slice(begin, end), rows[number]
            begun = number and rows[number - 1] == row
            before = states[-1] if begun else None if initial is None else initial[row : row + 1]
            whole = torch.tensor([0, end - begin], dtype=torch.int32)
            states.append(
                plain(
                    x[cut].contiguous(), dt[cut].contiguous(), A, B[cut].contiguous(), C[cut].contiguous(), chunk_size,
                    out[cut], z=None if z is None else z[cut], initial_states=before, cu_seqlens=whole, **more,
                )
            )  # fmt: skip
        return torch.cat(states)

    def store_checkpoint(
        checkpoint: Any, chunk_idx: Any, x: Any, conv: Any, chunks: Any, ssm: Any, begins: Any, *, state_len: int
    ) -> None:
        for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
            if offset > 0:
                block, end = int(checkpoint.state_indices[row]), int(begins[row]) + offset
                conv[block][:, :state_len] = x[:, end - state_len : end]
                ssm[block] = chunks[int(chunk_idx[row])]

    ssd_combined._mamba_chunk_scan_combined_fwd = by_chunks
    mamba_mixer2.store_prefill_checkpoint = store_checkpoint
