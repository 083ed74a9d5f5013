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
    """`on`, `off`: what happens with prefix caching and without: `WORKS`, "off: …" or "refused: …"."""

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


_TWICE = "refused: several KV cache groups"

ROWS = (
    Row("n-gram speculation", engine=_speculation(method="ngram", prompt_lookup_max=3)),
    Row("latent attention (MLA)", test=f"{VARIANTS}::test_latent_attention"),
    Row("asynchronous scheduling", test=f"{VARIANTS}::test_async_scheduling"),
    Row("tensor parallelism", test=f"{VARIANTS}::test_two_ranks_give_the_same_tokens_and_find_each_others_halves"),
    Row("beside other connectors, MultiConnector", test=f"{VARIANTS}::test_as_one_of_several_connectors"),
    Row("streaming sessions", test=f"{OFF}::test_a_streaming_session"),
    Row("asynchronous scheduling with speculation",
        test=f"{OFF}::test_async_scheduling_with_speculation_stores_as_much_as_without"),
    Row("weights loaded in place",
        test=f"{IDENTITY}::test_weights_that_are_loaded_in_place_take_the_old_blocks_away"),
    Row("an adapter overwritten on disk", test=f"{IDENTITY}::test_an_adapter_is_what_the_worker_loaded"),
    Row("pooling, last token", off="off: the model runs without prefix caching",
        test=f"{OFF}::test_the_same_text_is_embedded_twice"),
    Row("pooling, mean", on="off: vLLM turns prefix caching off", off="off: the model runs without prefix caching",
        test=f"{OFF}::test_the_same_text_is_embedded_twice"),
    Row("prefix LM", on="off: tokens attend to later ones", off="off: tokens attend to later ones",
        test=f"{OFF}::test_a_model_whose_prompts_attend_to_later_tokens_is_not_cached"),
    Row("sliding windows, hybrid models", on=_TWICE, off=_TWICE,
        test=f"{VARIANTS}::test_what_is_not_served_is_refused_at_start_with_the_reason"),
    Row("pipeline parallelism", on="refused: it needs other block shapes", off="refused: it needs other block shapes",
        test=f"{VARIANTS}::test_what_is_not_served_is_refused_at_start_with_the_reason"),
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
