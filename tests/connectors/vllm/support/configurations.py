"""The configurations that docs/vllm.md promises, each with the test that keeps the promise.

Rows whose test is `SWEEP` are run by test_sweep.py, with prefix caching and without; rows of equal `engine` share one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SWEEP = "test_sweep.py::test_a_configuration_gives_the_tokens_of_a_plain_engine"
OFF = "test_engine_off.py"
IDENTITY = "test_engine_identity.py"
VARIANTS = "test_variants.py"

WORKS = "works"


@dataclass(frozen=True)
class Row:
    """`on`, `off`: what happens with prefix caching and without: `WORKS`, "off: …", "refused: …" or "not tried: …"."""

    name: str
    on: str = WORKS
    off: str = WORKS
    test: str = SWEEP
    engine: dict[str, Any] = field(default_factory=dict)  # {"checkpoint": n} and {"other": kind} stand for paths
    asked: dict[str, Any] = field(default_factory=dict)  # how its requests are asked
    count: int = 3  # prompts
    length: int = 300  # of each


def _speculation(**given: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 3, **given}}


_WORDS = {"tokenizer": {"words": True}, "skip_tokenizer_init": False}
_FIRST_TURN = "works: nothing is stored from the second turn on; shown without a model"
_TWICE = "refused: several KV cache groups"
_MODELLESS = "works: shown without a model"
_UNPROVED = "refused: not proved"
_DIVIDED = "refused: their tokens are not divided"
_UNNAMED = "refused: its workers are not told apart"

ROWS = (
    Row("greedy sampling", engine=_WORDS),
    Row("cache salts", engine=_WORDS, asked={"salt": "one"}),
    Row("log-probabilities of the answer", engine=_WORDS, asked={"sampling": {"logprobs": 2}}),
    Row("several answers, n > 1", engine=_WORDS, asked={"sampling": {"n": 3, "temperature": 1.0, "top_k": 1}}),
    Row("structured output", engine=_WORDS, asked={"choice": ["11 12 13", "21 22 23"]}),
    Row("beam search", engine=_WORDS, asked={"beam": 2}),
    Row("chunked prefill", engine=_WORDS, length=1400, count=2),
    Row("fp8 KV", engine={"kv_cache_dtype": "fp8"}),
    Row("n-gram speculation", engine=_speculation(method="ngram", prompt_lookup_max=3)),
    Row("a draft model", engine=_speculation(method="draft_model", model={"checkpoint": 1})),
    Row("EAGLE", engine=_speculation(method="eagle", model={"other": "eagle"})),
    Row(
        "priorities with preemption",
        engine={"scheduling_policy": "priority", "num_gpu_blocks_override": 40, "max_model_len": 1024},
        asked={"priorities": True, "tokens": 60},
        count=8,
    ),
    Row("LoRA adapters", engine={"enable_lora": True, "max_lora_rank": 8, "max_loras": 4}, asked={"adapter": True}),
    Row("random weights, `--load-format dummy`", engine={"load_format": "dummy"}),
    Row("LongRoPE", engine={"model": {"other": "longrope"}}),
    Row("latent attention (MLA)", test=f"{VARIANTS}::test_latent_attention"),
    Row("latent attention on a CPU without AMX", on="off: vLLM turns prefix caching off",
        off="off: prompts are computed in one piece",
        test=f"{VARIANTS}::test_latent_attention_is_not_cached_where_the_engine_does_not_resume_it"),
    Row("asynchronous scheduling", test=f"{VARIANTS}::test_async_scheduling"),
    Row("tensor parallelism",
        test=f"{VARIANTS}::test_two_ranks_give_the_same_tokens_and_find_each_others_halves"),
    Row("pipeline parallelism, with tensor parallelism or without",
        test="test_stages.py::test_stages_set_up_otherwise"),
    Row("pipeline stages of unequal size",
        test="test_stages.py::test_stages_of_unequal_size_and_other_numbers_of_stages_do_not_read_each_others_blocks"),
    Row("beside other connectors, MultiConnector", test=f"{VARIANTS}::test_as_one_of_several_connectors"),
    Row("streaming sessions", test=f"{OFF}::test_a_streaming_session"),
    Row("the KV of a draft model", test=f"{OFF}::test_a_drafters_kv_comes_back_with_the_models"),
    Row("asynchronous scheduling with speculation",
        test=f"{OFF}::test_async_scheduling_with_speculation_stores_as_much_as_without"),
    Row("clients that go away at every stage", test=f"{OFF}::test_clients_that_go_away_at_every_stage"),
    Row("weights loaded in place",
        test=f"{IDENTITY}::test_weights_that_are_loaded_in_place_take_the_old_blocks_away"),
    Row("an adapter overwritten on disk", test=f"{IDENTITY}::test_an_adapter_is_what_the_worker_loaded"),
    Row("pause and wake (sleep)", test="test_engine_copies.py::test_an_engine_sleeps_and_wakes"),
    Row("pooling, last token", off="off: the model runs without prefix caching",
        test=f"{OFF}::test_the_same_text_is_embedded_twice"),
    Row("pooling, mean", on="off: vLLM turns prefix caching off", off="off: the model runs without prefix caching",
        test=f"{OFF}::test_the_same_text_is_embedded_twice"),
    Row("images", off="off: vLLM does not name them", test="test_images.py::test_each_image_has_its_own_kv"),
    Row("prefix LM", on="off: tokens attend to later ones", off="off: tokens attend to later ones",
        test=f"{OFF}::test_a_model_whose_prompts_attend_to_later_tokens_is_not_cached"),
    Row("sliding windows beside full attention (Gemma 3, gpt-oss)", off="refused: prefix caching is needed",
        test="test_hybrid.py::test_a_prompt_comes_back_as_the_engines_own_hit"),
    Row("states beside full attention (Qwen3-Next)", off="refused: prefix caching is needed",
        test="test_hybrid.py::test_a_prompt_comes_back_as_the_engines_own_hit"),
    Row("Mamba 2 beside full attention (Granite 4)", off="refused: prefix caching is needed",
        test="test_hybrid.py::test_a_prompt_comes_back_as_the_engines_own_hit"),
    Row("windows with n-gram speculation", off="refused: prefix caching is needed",
        test="test_hybrid.py::test_an_answer_with_drafts_comes_back"),
    Row("windows with n-gram speculation and tensor parallelism", on=_MODELLESS,
        off="refused: prefix caching is needed",
        test="test_stage_steps.py::test_requests_with_drafts_read_the_right_bytes_on_all_ranks"),
    Row("states with speculation", on="works: prompts, not answers; shown without a model",
        off="refused: prefix caching is needed",
        test="test_drafter_steps.py::test_requests_with_drafts_start_from_the_right_states"),
    Row("windows with a draft model", off="refused: prefix caching is needed",
        test="test_hybrid.py::test_a_drafters_kv_comes_back_beside_windows"),
    Row("windows with EAGLE or MTP", on=_MODELLESS, off="refused: prefix caching is needed",
        test="test_drafter_steps.py::test_requests_with_a_drafter_read_the_right_bytes"),
    Row("streaming sessions with drafts", on=_FIRST_TURN, off=_FIRST_TURN,
        test="test_drafter_steps.py::"
             "test_a_session_of_which_the_engine_took_drafts_for_its_next_turn_leaves_nothing"),
    Row("windows or states alone, several groups of full attention", on=_TWICE, off=_TWICE,
        test="test_groups.py::test_sets_of_groups_that_are_not_served_are_refused_with_the_reason"),
    Row("latent attention over pipeline stages, whose ranks share", off="not tried: with prefix caching alone",
        test="test_stages.py::test_ranks_of_a_stage_share_latent_attention"),
    Row("pipeline stages of windows or states beside full attention", off="refused: prefix caching is needed",
        test="test_group_ranks.py::test_windows_and_states_come_back_on_all_ranks"),
    Row("tensor parallelism of windows or states", off="refused: prefix caching is needed",
        test="test_group_ranks.py::test_windows_and_states_come_back_on_all_ranks"),
    Row("both, of windows or states", on=_MODELLESS, off="refused: prefix caching is needed",
        test="test_stage_steps.py::test_windows_and_states_come_back_on_all_ranks"),
    Row("decode context parallelism of full attention", on=_MODELLESS, off=_MODELLESS,
        test="test_stage_steps.py::test_a_prompt_comes_back_whose_tokens_ranks_divide_among_them"),
    Row("decode context parallelism of windows or states", on=_DIVIDED, off=_DIVIDED,
        test="test_groups.py::test_decode_context_parallelism_is_served_for_full_attention_alone"),
    Row("decode context parallelism with speculation", on=_UNPROVED, off=_UNPROVED,
        test="test_groups.py::test_decode_context_parallelism_is_served_for_full_attention_alone"),
    Row("windows or states with speculation over pipeline stages", on=_UNPROVED, off=_UNPROVED,
        test="test_groups.py::test_drafts_are_served_beside_windows_and_states"),
    Row("drafters with KV beside windows, and drafts beside states, with tensor parallelism", on=_UNPROVED,
        off=_UNPROVED, test="test_groups.py::test_drafts_are_served_beside_windows_and_states"),
    Row("prefill context parallelism", on=_UNNAMED, off=_UNNAMED,
        test="test_groups.py::test_prefill_context_parallelism_is_refused_with_the_reason"),
    Row("`xxhash` block hashes", on="refused: they do not resist collisions",
        off="refused: they do not resist collisions",
        test=f"{VARIANTS}::test_what_is_not_served_is_refused_at_start_with_the_reason"),
)  # fmt: skip


def swept() -> dict[str, list[Row]]:
    """Rows that the sweep runs, by the name of the first with the same engine."""
    groups: dict[str, list[Row]] = {}
    for row in ROWS:
        if row.test == SWEEP:
            same = next((name for name, rows in groups.items() if rows[0].engine == row.engine), row.name)
            groups.setdefault(same, []).append(row)
    return groups


def with_paths(value: Any, resolve: Callable[[str, Any], str]) -> Any:
    """Options with the paths that their stand-ins mean."""
    if isinstance(value, dict):
        if len(value) == 1:
            ((kind, which),) = value.items()
            if kind in ("checkpoint", "other", "words"):
                return resolve(kind, which)
        return {name: with_paths(one, resolve) for name, one in value.items()}
    return value


def table() -> str:
    """The table of docs/vllm.md."""
    lines = ["| configuration | with prefix caching | without | test |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.on} | {row.off} | `{row.test.partition('::')[2]}` |" for row in ROWS]
    return "\n".join(lines)
