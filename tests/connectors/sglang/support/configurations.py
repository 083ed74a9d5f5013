"""The configurations of SGLang that docs/sglang.md promises or refuses, each with the test that keeps the promise."""

from __future__ import annotations

from typing import NamedTuple

WORKS = "works"
ENGINE = "test_engine.py"
LONG = "test_engine_long.py"
IDENTITY = "test_identity.py"
POOL = "test_pool.py"
WINDOWS = "test_engine_windows"
STATES = "test_engine_states"


class Row(NamedTuple):
    """`outcome`: `WORKS`, or "refused: …" with the reason."""

    name: str
    outcome: str
    test: str


_PART = "refused: a part of the pool would be lost"
_POOLS = f"{POOL}::test_pools_that_would_lose_a_part_are_refused"
_STATE = "refused: a prefix without this state would be wrong"
_UNNAMED = f"{IDENTITY}::test_runs_whose_blocks_have_no_name_are_refused"
_SPREAD = f"{IDENTITY}::test_runs_whose_pages_are_spread_over_ranks_are_refused"

ROWS = (
    Row("salts, extra keys", WORKS, f"{ENGINE}::test_salts_never_share"),
    Row("aborted requests", WORKS, f"{ENGINE}::test_an_aborted_request_waits_no_more"),
    Row("new weights in place", WORKS, f"{ENGINE}::test_new_weights_never_meet_old_blocks"),
    Row("LoRA adapters of `--lora-paths`", WORKS,
        "test_engine_identity.py::test_an_adapter_retrained_at_its_path_misses"),
    Row("data parallelism", WORKS,
        "test_engine_identity.py::test_replicas_of_data_parallelism_have_metrics_of_their_own"),
    Row("tensor parallelism", WORKS, f"{LONG}::test_two_ranks_decide_alike"),
    Row("both tree cores; pages of 1, 16, 64", WORKS, f"{LONG}::test_other_tree_cores_and_pages"),
    Row("latent attention (MLA); its ranks share", WORKS, f"{IDENTITY}::test_mla_ranks_share"),
    Row("HiCache with kvtier as its storage", WORKS,
        "test_hicache_long.py::test_hicache_finds_its_pages_after_a_flush_and_a_restart"),
    Row("sliding windows in one pool with all other layers (Gemma 2, Gemma 3)", WORKS,
        f"{WINDOWS}_long.py::test_windows_that_sglang_keeps_whole_in_one_pool_come_back"),
    Row("sliding windows in a pool of their own, beside full attention (Mellum, gpt-oss)", WORKS,
        f"{WINDOWS}.py::test_a_prompt_comes_back_as_the_engines_own_hit"),
    Row("such windows with both tree cores; pages of 1, 16, 64", WORKS,
        f"{WINDOWS}_long.py::test_windows_over_other_tree_cores_and_pages"),
    Row("such windows with tensor parallelism", WORKS, f"{WINDOWS}_long.py::test_two_ranks_of_windows_decide_alike"),
    Row("such windows with a draft that reads them, rings of each request's, unified pools",
        "refused: not proved", f"{POOL}::test_trees_of_windows_that_were_not_proved_are_refused"),
    Row("such windows with the attention backend `torch_native`",
        "refused: it reads them at wrong indices, so what it computes is wrong",
        f"{POOL}::test_attention_that_reads_windows_elsewhere_is_refused"),
    Row("windows of latent attention, scaled or of another dtype, or much larger than the full layers", _PART,
        f"{POOL}::test_pools_of_windows_that_would_lose_a_part_are_refused"),
    Row("states of Mamba and linear attention, beside full attention (Granite 4, Qwen3-Next)", WORKS,
        f"{STATES}.py::test_a_prompt_comes_back_as_the_engines_own_hit"),
    Row("such states with pages of 1, 16, 64", WORKS,
        "test_states.py::test_states_are_cut_into_blocks_of_any_page"),
    Row("such states with tensor parallelism, SGLang's tree core in Python, no extra buffer, or a lazy one",
        "refused: not proved", f"{POOL}::test_states_in_engines_that_were_not_proved_are_refused"),
    Row("such states in a pool that has no slot to spare beside those of the requests that run",
        "refused: the engine would end while copies keep some",
        "test_states.py::test_a_pool_that_has_no_state_to_spare_is_refused"),
    Row("such states kept as int8, of drafts, in unified or page-major memory, with ReplaySSM, or with side states",
        _PART, f"{POOL}::test_pools_of_states_that_would_lose_a_part_are_refused"),
    Row("requests with states elsewhere than in such a pool", _STATE,
        f"{POOL}::test_requests_that_keep_states_elsewhere_are_refused"),
    Row("windows alone, windows and states in one model, other hybrid models", _STATE,
        f"{POOL}::test_hybrid_state_is_refused"),
    Row("SGLang's pools of windows and of linear attention where its tree is of other kinds", _STATE,
        f"{POOL}::test_sglangs_pools_of_windows_and_states_are_refused_by_themselves"),
    Row("index caches (DSA)", _PART, _POOLS),
    Row("KV scales per token", _PART, _POOLS),
    Row("HND pools (`SGLANG_USE_HND_KVCACHE`)", "refused: unset it", _POOLS),
    Row("packed and page-major pools", _PART, _POOLS),
    Row("heads of K and V of unequal size", "refused: equal sizes are needed", _POOLS),
    Row("speculative decoding with a draft model", "refused: its KV is not kept", _UNNAMED),
    Row("n-gram speculation", "refused: SGLang runs it on GPUs alone, so it is not proved", _UNNAMED),
    Row("diffusion language models (`--dllm-algorithm`)",
        "refused: not proved; SGLang turns HiCache off for them, too", _UNNAMED),
    Row("dynamic RoPE, LongRoPE", "refused: the rotation depends on the prompt's length", _UNNAMED),
    Row("pipeline parallelism", "refused: its stages cannot agree on a prefix", _SPREAD),
    Row("context parallelism", "refused: pages are spread over ranks", _SPREAD),
    Row("HiCache without `interface_v1`", "refused: no other way of calling is served",
        "test_hicache.py::test_what_would_never_work_is_refused"),
    Row("HiCache with other pools than KV", "refused: the attach fails",
        "test_hicache.py::test_what_would_never_work_is_refused"),
)  # fmt: skip


def table() -> str:
    """The table of docs/sglang.md."""
    lines = ["| configuration | | test |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.outcome} | `{row.test.partition('::')[2]}` |" for row in ROWS]
    return "\n".join(lines)
