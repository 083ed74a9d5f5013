"""Hooks into SGLang for events that its linker interface leaves out.

A linker is handed page hashes beyond the device's prefix, without the pages before them, the request, its salt, or word
of new weights. Small hooks, made with SGLang's own HookRegistry, call a `LinkerListener`:

    match               the request whose prompt is looked up, and the pages before those on the device's edge; its
                        tree is told where the prompt leaves what is known, where windows or states are kept
    checkpoint          the request whose pages the tree is about to offload, and up to where
    admission           may wait: a request whose blocks are on their way up is passed over until they are there
    release             the request is gone
    events              those of the tree, and the linker's after them
    results             the tokens that the last batch computed, and since when
    weights             changed in place
    sleep               the device's pages are about to lose their memory
    adapters            named when they are loaded

SGLang loads `register` in each of its processes through the entry-point group sglang.srt.plugins; a linker whose
process did not do so (SGLANG_PLUGINS excludes it) installs the hooks itself. They pass through for other linkers. A
HiCacheStorage is a `WeightsListener`: it is called for new weights and for flushes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from kvtier.connectors.fallback import falls_back_to
from kvtier.connectors.settings import Settings
from kvtier.connectors.sglang import adapters
from kvtier.connectors.sglang.transfers import PAGES, STATES
from kvtier.errors import ConfigError


class Checkpoint(NamedTuple):
    """A request's tokens enter the tree: up to `end`, of which it has the first `begin`. `lasting`: they are all of its
    prompt, or end where it leaves another one, and the tree keeps a window or a state there (`branch`)."""

    begin: int = 0
    end: int = 0
    lasting: bool = False
    branch: bool = False


NO_CHECKPOINT = Checkpoint()


class WeightsListener(ABC):
    """Stores blocks of the engine's weights. All calls come from the scheduler's thread; none may wait or raise."""

    _settings: Settings
    _stale = False  # the weights changed, and the tree was not flushed since

    @falls_back_to(None)
    def weights_change(self) -> None:
        """The weights are about to change in place."""
        if not self._keeps_on_reset():
            self._stale = True  # and stays so where the next call fails
            self._stale = self._rotate()

    @falls_back_to(None)
    def flushed(self) -> None:
        """The tree is empty now, and so are the queues of a HiCache. If the weights changed since the last time, blocks
        stored meanwhile may follow a prefix of old ones."""
        if self._stale:
            self._stale = False
            self._rotate()

    def _keeps_on_reset(self) -> bool:
        return self._settings.config.keep_on_reset

    @abstractmethod
    def _rotate(self) -> bool:
        """Go on under another namespace; whether there was a cache to replace."""


class LinkerListener(WeightsListener):
    """A linker with the events of its requests."""

    @abstractmethod
    def before_lookup(self, req: Any, head: Callable[[], list[str]], agree: Callable[[bool], bool]) -> None:
        """`lookup` comes next, for this request; `head()` are the page hashes on the device, from the first on. `agree`
        is true if its argument is on every rank; every rank must call it in the same place."""

    branch = ""
    """Where prompts come back at boundaries alone: the field of SGLang's match result that says where a prompt leaves
    what is known, so that the tree keeps a boundary there."""

    @abstractmethod
    def known_of(self, rid: str) -> int:
        """How many leading pages of a request's prompt are known below the device, though it may not be given all of
        them, down to where a boundary can be; of a linker that has a `branch`."""

    @abstractmethod
    def offloads_for(self, req: Any | None, checkpoint: Checkpoint = NO_CHECKPOINT) -> None:
        """Offloads from now on are of this request; None: of no request."""

    @abstractmethod
    def before_offload(self, head: list[str], path: Callable[[], Any] | None = None) -> None:
        """`offload` comes next, of pages that follow these. `path()` are the slots in the full pool of all tokens up to
        the end of what is offloaded."""

    @abstractmethod
    def offload(self, transfers: Any, session_id: str | None = None) -> bool:
        """As SGLang's linkers have it."""

    @abstractmethod
    def awaited(self, rid: str) -> bool:
        """Whether the request should wait for its blocks, on all ranks alike."""

    @abstractmethod
    def admitted(self, req: Any) -> None:
        """The request is in the next batch."""

    @abstractmethod
    def forget(self, rid: str) -> None:
        """The request is finished or aborted."""

    @abstractmethod
    def kv_events(self) -> list[Any]:
        """SGLang's KV events of the tiers' blocks since the last call."""

    @abstractmethod
    def batch_done(self, batch: Any) -> None:
        """A batch's results are there."""

    @abstractmethod
    def memory_goes(self) -> None:
        """The device's pages are about to lose their memory: nothing may read or write them after this. May wait."""


def _linker_of(wrapper: Any) -> LinkerListener | None:
    linker = getattr(wrapper, "cache_linker", None)
    return linker if isinstance(linker, LinkerListener) else None


def _match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    linker = _linker_of(wrapper)
    if linker is None:
        return original(wrapper, key, req, result)
    core, node = wrapper.cache.tree_core, result.last_device_node

    def head() -> list[str]:
        if result.device_prefix_len <= 0:
            return []
        return [*core.get_prefix_hash_values(node), *core.get_hash_values(node)]

    linker.before_lookup(req, head, partial(_on_all_ranks, wrapper.cache))
    found = original(wrapper, key, req, result)
    if not linker.branch:
        return found
    leaves = wrapper.cache.page_size * _least_of_all_ranks(wrapper.cache, linker.known_of(req.rid))
    # As the tree does itself for what is on the device: it inserts the prompt up to there first, with a whole window or
    # a state that the forward tracks there.
    hit = found.device_prefix_len + found.host_hit_length
    beyond = leaves > max(hit, getattr(found, linker.branch) or 0)
    return found._replace(**{linker.branch: leaves}) if beyond else found


def _offload_node(wrapper: Any, node_id: Any, transfers: Any) -> None:
    if (linker := _linker_of(wrapper)) is not None:
        core = wrapper.cache.tree_core
        linker.before_offload(core.get_prefix_hash_values(node_id), partial(_path, core, node_id))


def _path(core: Any, node_id: Any) -> Any:
    return core.collect_full_device_indices(node_id, core.root_node_handle())


def _release_request(wrapper: Any, rid: str) -> None:
    if (linker := _linker_of(wrapper)) is not None:
        linker.forget(rid)


def _checkpoint(original: Callable[..., Any], cache: Any, req: Any, **arguments: Any) -> Any:
    linker = _linker_of(cache.linker)
    if linker is None:
        return original(cache, req, **arguments)
    checkpoint = _checkpoint_of(req, arguments.get("up_to", 0))
    linker.offloads_for(req, checkpoint)
    try:
        done = original(cache, req, **arguments)
        if checkpoint.branch:
            _offer_again(cache, linker, req.last_node)
        return done
    finally:
        linker.offloads_for(None)


@falls_back_to(None)
def _offer_again(cache: Any, linker: LinkerListener, node: Any) -> None:
    """A prompt has left another one at the end of a node that the tree has, and it has a window or a state now. The
    tree offers no node twice: it is offered here as there, but for that the node stays marked as it is."""
    core, wrapper = cache.tree_core, cache.linker
    pending = any(node in one.publish_node_ids for one in wrapper.pending_offloads)
    if pending or core.build_external_linker_offload_transfers(node) is not None:
        return
    transfer, module = resolve_name("sglang.srt.mem_cache.hicache_storage:PoolTransfer"), _WRAPPER.rpartition(".")[0]
    states = resolve_name("sglang.srt.mem_cache.unified_cache.component_type:ComponentType").MAMBA
    if not (keys := list(core.get_hash_values(node))):
        return
    slots = _path(core, node)[-len(keys) * cache.page_size :]
    offered = [transfer(name=PAGES, keys=keys, device_indices=slots)]
    if states in cache.tree_components:
        if (state := core.get_component_device_value(node, states)) is None:
            return
        offered.append(transfer(name=STATES, keys=keys[-1:], device_indices=state))
    lock = cache.inc_lock_ref(node).to_dec_params()
    linker.before_offload(core.get_prefix_hash_values(node), partial(_path, core, node))
    try:
        queued = linker.offload(offered)
    except BaseException:
        cache.dec_lock_ref(node, lock)
        raise
    if queued:
        wrapper.pending_offloads.append(resolve_name(f"{module}:_PendingOffload")(node, lock, []))
    else:
        cache.dec_lock_ref(node, lock)


def _checkpoint_of(req: Any, up_to: int) -> Checkpoint:
    begin, leaves = int(getattr(req.kv, "cache_protected_len", 0)), req.swa_branching_seqlen
    if leaves is not None and begin < leaves <= up_to:
        return Checkpoint(begin, int(leaves), lasting=True, branch=True)  # the tree takes no more of it this time
    tracked = getattr(req.kv, "mamba_last_track_seqlen", None)  # of a model with states, the tree takes it up to there
    branch = tracked is not None and tracked == getattr(req, "mamba_branching_seqlen", None)
    return Checkpoint(begin, up_to, lasting=branch or up_to >= len(req.origin_input_ids), branch=branch)


def _add_one_req(original: Callable[..., Any], adder: Any, req: Any, *arguments: Any, **named: Any) -> Any:
    cache = adder.tree_cache
    linker = _linker_of(getattr(cache, "linker", None))
    if linker is None:
        return original(adder, req, *arguments, **named)
    if linker.awaited(req.rid):
        _give_back_state(cache, req)
        return resolve_name("sglang.srt.managers.schedule_policy:AddReqResult").CONTINUE
    outcome = original(adder, req, *arguments, **named)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        linker.admitted(req)
    return outcome


def _give_back_state(cache: Any, req: Any) -> None:
    """The match has taken a slot for the request's state, and is made anew before the request is admitted. SGLang gives
    such a slot back at the request with which it ends a batch, and passes over none that has one: those of requests
    that wait would leave the ones that run without."""
    kv = req.kv
    if kv is None or not kv.holds_mamba or getattr(req, "session", None):  # a session's is its own
        return
    cache.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
    kv.mamba_pool_idx = kv.mamba_cow_src_index = None
    kv.mamba_needs_clear = False


def _take_events(original: Callable[..., Any], cache: Any) -> Any:
    events, linker = original(cache), _linker_of(getattr(cache, "linker", None))
    if linker is None or not (own := linker.kv_events()):
        return events
    # Routers forget the tree's blocks, too, where the linker's are to be forgotten: they hear of the tree's after that.
    clears = resolve_name("sglang.srt.disaggregation.kv_events:AllBlocksCleared")
    stop = max((place for place, event in enumerate(own, 1) if isinstance(event, clears)), default=0)
    return [*own[:stop], *events, *own[stop:]]


def _on_all_ranks(cache: Any, answer: bool) -> bool:
    return bool(_least_of_all_ranks(cache, int(answer)))


def _least_of_all_ranks(cache: Any, number: int) -> int:
    import torch

    least = torch.tensor([number], dtype=torch.int)
    cache._all_reduce_attn_groups(least, torch.distributed.ReduceOp.MIN)
    return int(least.item())


def _ran(_: Any, processor: Any, batch: Any, result: Any) -> None:
    if (linker := _linker_of(getattr(getattr(processor, "tree_cache", None), "linker", None))) is not None:
        linker.batch_done(batch)


def _flushed(_: Any, cache: Any) -> None:
    if (listener := _listener_of(cache)) is not None:
        listener.flushed()


def _listener_of(cache: Any) -> WeightsListener | None:
    """The linker of a tree, or the storage below its HiCache; SGLang's fault injector wraps the latter."""
    backend = getattr(getattr(cache, "cache_controller", None), "storage_backend", None)
    for candidate in (_linker_of(getattr(cache, "linker", None)), backend, getattr(backend, "_backend", None)):
        if isinstance(candidate, WeightsListener):
            return candidate
    return None


def _weights(updater: Any, request: Any) -> None:
    if (listener := _listener_of(getattr(updater.scheduler, "tree_cache", None))) is not None:
        listener.weights_change()


def _sleep(updater: Any, request: Any) -> None:
    if not request.tags or "kv_cache" in request.tags:
        linker = _linker_of(getattr(getattr(updater.scheduler, "tree_cache", None), "linker", None))
        if linker is not None:  # SGLang waits for a HiCache's copies itself
            linker.memory_goes()


def _resume(updater: Any, request: Any) -> None:
    if not request.tags or "weights" in request.tags:
        _weights(updater, request)


_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (f"{_WRAPPER}.match", "around", _match),
    (f"{_WRAPPER}._offload_node", "before", _offload_node),
    (f"{_WRAPPER}.release_request", "before", _release_request),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", "around", _checkpoint),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset", "after", _flushed),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events", "around", _take_events),
    ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", "around", _add_one_req),
    (f"{_RESULTS}.process_batch_result_prefill", "after", _ran),
    (f"{_RESULTS}.process_batch_result_decode", "after", _ran),
    (f"{_UPDATER}.update_weights_from_disk", "before", _weights),
    (f"{_UPDATER}.update_weights_from_distributed", "before", _weights),
    (f"{_UPDATER}.update_weights_from_tensor", "before", _weights),
    (f"{_UPDATER}.update_weights_from_ipc", "before", _weights),
    (f"{_UPDATER}.begin_weight_update", "before", _weights),  # from now on they may be written from outside (RDMA)
    (f"{_UPDATER}.end_weight_update", "before", _weights),
    (f"{_UPDATER}.release_memory_occupation", "before", _sleep),
    (f"{_UPDATER}.resume_memory_occupation", "before", _resume),
    ("sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter", "around", adapters.load),
)


def register() -> None:
    """Name the hooks to SGLang, once per process; SGLang applies them when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, hook in _HOOKS:
        if not _known(HookRegistry, target, hook):
            HookRegistry.register(target, hook, HookType(kind))


def install() -> None:
    """See to it that the hooks are in place in this process. Raises ConfigError that names the obstacle."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target, _, hook in _HOOKS:
        try:
            resolve_name(target)
        except (ImportError, AttributeError):
            raise ConfigError(
                f"this release of SGLang has no {target}, which the linker needs; use sglang 0.5.23"
            ) from None
        if target in HookRegistry._patched and not _known(HookRegistry, target, hook):
            raise ConfigError(
                f"another plug-in hooks {target} and kvtier's was not loaded with it; name kvtier in SGLANG_PLUGINS"
            )
    register()
    HookRegistry.apply_hooks()
    if missing := [target for target, _, _ in _HOOKS if target not in HookRegistry._patched]:
        raise ConfigError(f"SGLang could not hook {missing[0]}; its log says why")


def _known(registry: Any, target: str, hook: Callable[..., Any]) -> bool:
    return any(known is hook for _, known, _ in registry._hooks.get(target, ()))
