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


def scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any, dt_bias: Any, initial_states: Any,
    cu_seqlens: Any, track_seq_idx: Any, track_end_locs: Any, out: Any, **_: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """As mamba_chunk_scan_combined: the states before each chunk of the batch, at the end of each sequence, and those
    that are asked for by sequence and place."""
    x, lasts, B, C = x[0], softplus(dt[0] + dt_bias), _by_head(B[0], x.shape[2]), _by_head(C[0], x.shape[2])
    decay, states = torch.exp(lasts * A)[:, :, None, None], _given(x, lasts, B)
    starts, begins = cu_seqlens.tolist(), {}
    for row, (begin, end) in enumerate(pairwise(starts)):
        begins[row] = state = torch.zeros_like(states[0]) if initial_states is None else initial_states[row].float()
        for at in range(begin, end):
            state = states[at].addcmul_(state, decay[at])
    out[0] = _read(states, x, C, D)

    def before(row: int, at: int) -> Any:
        return begins[row] if at == starts[row] else states[at - 1]

    rows = torch.bucketize(torch.arange(0, len(x), chunk_size), cu_seqlens[1:].long(), right=True).tolist()
    chunks = torch.stack([before(row, number * chunk_size) for number, row in enumerate(rows)])
    ends = torch.stack([before(row, end) for row, end in enumerate(starts[1:])])
    if track_end_locs is None or not len(track_end_locs):
        return chunks[None], ends, None
    asked = zip(track_seq_idx.tolist(), track_end_locs.tolist(), strict=True)
    return chunks[None], ends, torch.stack([before(row, at) for row, at in asked])[None]


def step(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any, state_batch_indices: Any, out: Any,
    **_: Any,
) -> None:  # fmt: skip
    """As selective_state_update: one token of each sequence."""
    slots, lasts = state_batch_indices.long(), softplus(dt[:, :, 0] + dt_bias[:, 0])
    given = _given(x, lasts, _by_head(B, x.shape[1]))
    states = given.addcmul_(state[slots], torch.exp(lasts * A[:, 0, 0])[:, :, None, None])
    state[slots] = states
    out.copy_(_read(states, x, _by_head(C, x.shape[1]), D[:, 0]).view_as(out))


def _by_head(values: Any, heads: int) -> Any:
    """[tokens, groups, inner] for each head."""
    return values.repeat_interleave(heads // values.shape[1], dim=1)


def _given(x: Any, lasts: Any, B: Any) -> Any:
    """What each token adds to the state [heads, channels, inner]: x [tokens, heads, channels], B [tokens, heads,
    inner], and for how long it `lasts` [tokens, heads]."""
    return (lasts[:, :, None] * x)[..., None] * B[:, :, None, :]


def _read(states: Any, x: Any, C: Any, D: Any) -> Any:
    return (states * C[:, :, None, :]).sum(-1) + D[:, None] * x


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
