"""Mamba 2 in torch, token by token: SGLang's kernels for it are written in Triton, which a CPU has not. They read and
write the same slots of SGLang's pool, and leave the same states where its tree tracks them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import silu, softplus


def convolve(
    x: Any, weight: Any, bias: Any, conv_states: Any, query_start_loc: Any, cache_indices: Any, has_initial_state: Any,
    **_: Any,
) -> Any:  # fmt: skip
    """As causal_conv1d_fn: [channels, tokens] of several sequences, each with a slot for its last inputs."""
    out = torch.empty_like(x)
    for row, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        state = conv_states[int(cache_indices[row])]
        before = state.to(x.dtype) if bool(has_initial_state[row]) else torch.zeros(state.shape, dtype=x.dtype)
        seen = torch.cat([before, x[:, begin:end]], dim=1)
        windows = seen.unfold(1, weight.shape[1], 1)
        out[:, begin:end] = silu((windows * weight[:, None, :]).sum(-1) + (0 if bias is None else bias[:, None]))
        state.copy_(seen[:, 1 - weight.shape[1] :])
    return out


def convolve_one(
    x: Any, conv_state: Any, weight: Any, bias: Any, activation: Any, conv_state_indices: Any, **_: Any
) -> Any:
    """As causal_conv1d_update: one token of each sequence."""
    slots = conv_state_indices.long()
    seen = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_state[slots] = seen[:, :, 1:].to(conv_state.dtype)
    return silu((seen * weight[None]).sum(-1) + (0 if bias is None else bias))


def _step(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> tuple[Any, Any]:
    """One token: state [heads, channels, inner], x [heads, channels], dt, A, D [heads], B, C [heads, inner]."""
    state = state * torch.exp(dt * A)[:, None, None] + (dt[:, None] * x)[:, :, None] * B[:, None, :]
    return state, (state * C[:, None, :]).sum(-1) + D[:, None] * x


def scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any, dt_bias: Any, initial_states: Any,
    cu_seqlens: Any, track_seq_idx: Any, track_end_locs: Any, out: Any, **_: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """As mamba_chunk_scan_combined: the states before each chunk of the batch, at the end of each sequence, and those
    that are asked for by sequence and place."""
    x, dt, B, C, out = x[0], softplus(dt[0] + dt_bias), B[0], C[0], out[0]
    heads, shape = x.shape[1], (x.shape[1], x.shape[2], B.shape[2])
    B, C = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (B, C))
    starts, rows, places = cu_seqlens.tolist(), track_seq_idx, track_end_locs
    asked = dict[tuple[int, int], int]()
    if places is not None:
        asked = {where: n for n, where in enumerate(zip(rows.tolist(), places.tolist(), strict=True))}
    chunks = torch.zeros(-(-len(x) // chunk_size), *shape)
    ends, tracked = torch.zeros(len(starts) - 1, *shape), torch.zeros(len(asked), *shape)
    for row, (begin, end) in enumerate(pairwise(starts)):
        state = torch.zeros(shape) if initial_states is None else initial_states[row].float()
        for at in range(begin, end):
            if at % chunk_size == 0:
                chunks[at // chunk_size] = state
            if (row, at) in asked:
                tracked[asked[row, at]] = state
            state, out[at] = _step(state, x[at], dt[at], A, B[at], C[at], D)
        if (row, end) in asked:
            tracked[asked[row, end]] = state
        ends[row] = state
    return chunks[None], ends, tracked[None] if asked else None


def step(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any, state_batch_indices: Any, out: Any,
    **_: Any,
) -> None:  # fmt: skip
    """As selective_state_update: one token of each sequence."""
    heads = x.shape[1]
    for row, slot in enumerate(state_batch_indices.tolist()):
        b, c = (one[row].repeat_interleave(heads // one.shape[1], dim=0) for one in (B, C))
        lasts = softplus(dt[row, :, 0] + dt_bias[:, 0])
        state[slot], y = _step(state[slot], x[row], lasts, A[:, 0, 0], b, c, D[:, 0])
        out[row] = y.view_as(out[row])


def track(conv: Any, ssm: Any, slots: Any, mask: Any, targets: Any, rows: int, **_: Any) -> None:
    """As track_mamba_states_if_needed: copies of the running states, for the tree."""
    for row in range(rows):
        if bool(mask[row]) and int(targets[row]) >= 0:
            conv[targets[row]], ssm[targets[row]] = conv[slots[row]], ssm[slots[row]]


def mend() -> None:
    """For models of this process, before their first forward. Idempotent."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.mamba import mamba

    mamba.causal_conv1d_fn_triton = mamba.causal_conv1d_fn = convolve
    mamba.causal_conv1d_update_triton = mamba.causal_conv1d_update = convolve_one
    mamba.mamba_chunk_scan_combined, mamba.selective_state_update = scan, step
    hybrid_linear_attn_backend.track_mamba_states_if_needed = track


def allow_tracking() -> None:
    """For engines of this process: SGLang has its extra buffer on GPUs alone, since its kernels are. Idempotent."""
    from sglang.srt.arg_groups import mamba_hook

    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
