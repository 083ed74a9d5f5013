"""Prefix reuse for Hugging Face transformers: one object between the prompts and `model.generate`.

    with PrefixCache(config, model) as prefixes:
        cache, hit_tokens = prefixes.fetch(input_ids)
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), past_key_values=cache)
        prefixes.store(output, cache, attention_mask=torch.ones_like(output))

kvtier owns G1 here: a DevicePool on the model's device. A prefix is looked for in G1, then through the manager in
G2 … G4, and what came from below is onboarded. New blocks are confirmed in G1, wait on its dirty list, and are
offloaded ahead of the reuse of their slots.

The cache that `fetch` returns is a copy: the model may grow, crop or drop it. Decoder-only models, one row per call;
beside layers of full attention, of which there must be one, sliding windows and recurrent states are kept at boundaries
(`kvtier.identity.groups`). Everything that cannot be kept exactly is refused with an InvalidRequest that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvtier import cache as byte_cache
from kvtier.clock import Clock, SystemClock
from kvtier.config import Config, cache_folder
from kvtier.connectors.counters import tokens_by_tier
from kvtier.connectors.purges import Purges
from kvtier.connectors.transformers.boundaries import Boundaries, Found
from kvtier.connectors.transformers.chains import Chains
from kvtier.connectors.transformers.forwards import Forwards
from kvtier.connectors.transformers.groups import full_layers
from kvtier.connectors.transformers.model import media_ids, namespace_of, probe
from kvtier.connectors.transformers.settled import Settled
from kvtier.connectors.transformers.traffic import Traffic
from kvtier.errors import InvalidRequest
from kvtier.identity.hashing import chain_hashes, chain_root
from kvtier.identity.keys import TENANT_BYTES, BlockKey, Scope, make_keys, scope_of
from kvtier.kernels.engine import cpus_near
from kvtier.manager.closing import Flushed
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.terms import Depth, Terms, resolve
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.tiers.device.tails import Tails, tail_key
from kvtier.tiers.device.torch_pool import DevicePool
from kvtier.tiers.protocol import Miss, Tier
from kvtier.times import Mono

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

_SPILL_AHEAD_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What a cache object was handed out with: the blocks that were found."""

    keys: tuple[BlockKey, ...]


class PrefixCache:
    """The KV of one model's prompts, over all four tiers. Not thread-safe: one call at a time.

    `name` and `weights` override the identity read from the live model; `tiers` replaces the configured lower tiers.
    `tails`: behind so many blocks, the latest used, G1's are remembered, and prompts that part inside of one share its
    first tokens (full attention only); 0: prefixes end with a block. After the weights change, open a new one. Raises
    IdentityError, InvalidRequest or ConfigError for a model or a configuration that cannot be served.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        *,
        block_tokens: int = 16,
        tails: int = 0,
        name: str | None = None,
        weights: str | None = None,
        clock: Clock | None = None,
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.shape = probe(model)
        self._settled = Settled(model)
        self.namespace = namespace_of(model, self.shape, block_tokens, name=name, weights=weights, mode=config.weights)
        self.served: Counter[str] = Counter()  # prompt tokens: by the tier that had them, and "recomputed"
        self.groups_served: dict[str, Counter[str]] = {}  # blocks by tier, of "full" and each group beside it
        self.clock = TrustedClock.around(clock or SystemClock())  # G1's, too, and the same as the other tiers'
        self._adopted = 0  # times that it has accepted
        self._config = config
        self._classes = config.terms()
        self._fetched: WeakKeyDictionary[Any, _Fetched] = WeakKeyDictionary()
        self._media = media_ids(model)
        self._tails = Tails(tails) if tails and not self.shape.groups.beside else None
        blocks, offload = config.tiers.g1.blocks, config.offload
        self.pool = DevicePool(
            blocks,
            self.namespace.block_bytes,
            device=self.shape.device,
            horizon=int(blocks * _SPILL_AHEAD_FRACTION) if offload.spill_ahead == "auto" else offload.spill_ahead,
            dirty_max_age_s=0.0 if offload.mode == "eager" else offload.dirty_max_age,
        )
        self._kv = self.pool.typed(self.shape.dtype, self.shape.block(block_tokens))
        near = [cpus_near(self.pool.rows.device)]
        self.cache = byte_cache.open(config, self.namespace, clock=self.clock, tiers=tiers, near=near)
        try:
            self.pool.attach(self.cache.manager.host.arena, offload.copy_by, cache_folder())
        except BaseException:
            self.cache.close()
            raise
        self.pool.on_lost = partial(self.cache.manager.lost, why=Miss.SPILL_LOST)
        self._purges = Purges()
        self._traffic = Traffic(self.pool, self.cache, self.clock, self._drop_purged)
        self._chains = Chains(self.pool, self.cache, self._traffic, self.clock)
        groups = self.shape.groups
        self._boundaries = Boundaries(groups, block_tokens, self.pool, self.cache, self._chains, self.clock)
        self._forwards = Forwards(model, groups, block_tokens, self._boundaries.counts, self._settled)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- the two verbs -----------------------------------------------------------------------------------------

    def fetch(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        retention: str | None = None,
        salt: str | bytes | None = None,
        timeout: float | None = None,
        advance: bool = True,
    ) -> tuple[DynamicCache, int]:
        """A cache object that holds the longest known prefix of the prompt, and the length of that prefix in tokens.

        The length is a multiple of `block_tokens` (with `tails`: any), and at most len(prompt) - 1, since `generate`
        must have a token left to compute. Pass the whole `input_ids` and a mask of ones to `generate`. May wait for
        lower tiers up to `timeout` seconds (deadlines.get); whatever fails or is late there makes the prefix shorter.
        The cache is the caller's. With `advance`, and of a model with windows or states, it holds more than was known:
        see the verb of that name. Raises InvalidRequest for a batch, padding, images or an unknown retention class.
        """
        tokens = self._row(input_ids, attention_mask)
        terms = self._terms(retention)
        chain = self._chain(tokens, terms, salt)[: (len(tokens) - 1) // self.block_tokens]
        if not self.shape.groups.beside:
            rows, tiers = self._chains.read(chain, timeout)
            found = Found(rows, tiers, len(tiers))
        else:
            found = self._boundaries.find(chain, timeout)
        cache, hit = self._cache_of(found), len(found.tiers) * self.block_tokens
        self._account(found, len(tokens))
        if self._tails is not None and self._chains.proven:
            parent = chain[len(found.tiers) - 1] if found.tiers else self._root(terms, salt)
            hit += self._add_tail(self._tails, cache, parent, tokens[hit:-1])
        self._fetched[cache] = _Fetched(chain[: len(found.tiers)])
        self._forwards.follow(cache, tokens[:hit], found.known * self.block_tokens)
        if advance:
            self._forwards.advance(cache, input_ids)
        return cache, hit

    def advance(self, cache: DynamicCache, input_ids: torch.Tensor) -> list[int]:
        """Compute the prompt up to its last boundary, in a cache that `fetch` returned for it, so that this boundary
        can be kept: windows and states can be, only where a forward pass ends. Returns where passes ended, in tokens;
        of a model without such layers nothing is computed, and the list is empty. Raises InvalidRequest as `fetch`
        does, and for another cache."""
        tokens = self._row(input_ids, None)
        if not self._forwards.follows(cache):
            raise InvalidRequest("this cache was not returned by `fetch`: advance the one that was")
        self._check_cache(cache, tokens)
        return self._forwards.advance(cache, input_ids)

    def store(
        self,
        output_ids: torch.Tensor,
        cache: DynamicCache,
        *,
        attention_mask: torch.Tensor | None = None,
        retention: str | None = None,
        salt: str | bytes | None = None,
        timeout: float | None = None,
    ) -> int:
        """Keep the full blocks of `cache`, which holds the KV of a prefix of `output_ids`, and what windows and states
        held at its boundaries. Returns how many full blocks are new.

        Call it when `generate` has returned: its blocks are confirmed then. Copies within the device, and to host RAM
        the blocks that must make space; where that is full, waits for the tiers below up to `timeout` seconds
        (deadlines.put), then stores the head and refuses the rest. Raises InvalidRequest, with nothing stored, for
        padding, for tokens that `generate` may have masked as padding, for other tokens than the cache was fetched for,
        and for layers or types that blocks cannot be cut from.
        """
        tokens = self._row(output_ids, attention_mask)
        if attention_mask is None:
            self._refuse_inferred_padding(output_ids)
        self._check_cache(cache, tokens)
        terms = self._terms(retention)
        chain = self._chain(tokens[: cache.get_seq_length()], terms, salt)
        deadline = Mono(self.clock.monotonic() + (self._config.deadlines.put if timeout is None else timeout))
        # Blocks that `fetch` took from below and G1 had no slot for are below still: they need not come again.
        fetched = self._fetched[cache].keys[: len(chain)] if cache in self._fetched else ()
        below = len(fetched) if chain[: len(fetched)] == fetched else 0
        first, reached = self._chains.keep(chain, terms, deadline, partial(self._write, cache), below)
        for boundary, taken in self._forwards.boundaries(cache).items():
            if boundary <= reached * self.block_tokens:
                self._boundaries.keep(chain, boundary, taken, terms, deadline)
        if self._tails is not None and reached == len(chain):
            parents = (self._root(terms, salt), *chain)
            self._keep_tails(self._tails, cache, parents, tokens, replace(terms, ceiling=Depth.G1))
        self.step()
        return reached - first

    # --- offload -----------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Copy out what G1 is about to hand out, then what has been dirty for too long, at most 64 MiB of it.

        `store` ends with one; call it when idle, too. Never waits. Returns how many blocks were copied.
        """
        return self._traffic.step()

    def flush(self, timeout: float | None = None) -> Flushed:
        """Offload everything that is dirty, then wait until it is as deep as it may go, or the timeout is over."""
        return self._traffic.flush(self._config.deadlines.flush if timeout is None else timeout)

    # --- the rest ----------------------------------------------------------------------------------------------

    def purge(self, salt: str | bytes | None = None) -> int:
        """Drop every block of a salt (None: of requests without one) from every tier and replica, for good."""
        tenant = self._scope(salt, None)
        self._forget({tenant})
        try:
            return self.cache.purge(salt)
        finally:
            self._traffic.follow_purges()

    def _drop_purged(self) -> None:
        """Drop what G1 has of tenants that were purged elsewhere, and what a time stamped that was given up since,
        before anything of it is served or stored."""
        self._purges.take_to(self._forget, self.cache.manager)
        now = self.clock.read()
        if self.clock.adopted != self._adopted:
            self._adopted = self.clock.adopted
            self.pool.drop_made_after(now.serve + FUTURE_S)

    def _forget(self, tenants: set[Scope]) -> None:
        for tenant in tenants:
            prefix = Scope(tenant[:TENANT_BYTES])  # whatever class its requests were isolated in
            self.pool.purge(prefix)
            if self._tails is not None:
                self._tails.purge(prefix)

    def stats(self) -> dict[str, Any]:
        """The cache's statistics, with `g1` and the prompt tokens served by tier."""
        g1 = {"blocks": self.pool.resident, "capacity": self.pool.blocks, "dirty": self.pool.dirty,
              "evictions": self.pool.evicted, "spill_lost": self.pool.spill_lost}  # fmt: skip
        return {**self.cache.stats(), "g1": g1, "tokens": dict(self.served)}

    def check(self) -> None:
        """Assert the invariants of every tier."""
        self.pool.check()
        self.cache.check()
        if self._tails is not None:
            self._tails.check()

    def close(self) -> Flushed:
        """Offload, flush, release everything, also where one of them is interrupted. Idempotent."""
        self._forwards.close()
        try:
            if not self.cache.manager.closed:
                self.flush(self._config.deadlines.close)
        finally:
            try:
                self.pool.detach()
            finally:
                flushed = self.cache.close()
        return flushed

    def _terms(self, retention: str | None) -> Terms:
        return resolve(retention or self._config.retention.default, self._classes)

    def _scope(self, salt: str | bytes | None, terms: Terms | None) -> Any:
        isolated = terms.name if terms is not None and terms.isolate else ""
        return scope_of(salt, isolated=isolated, secret=self._config.scope_secret)

    def _chain(self, tokens: Any, terms: Terms, salt: str | bytes | None) -> tuple[BlockKey, ...]:
        scope = self._scope(salt, terms)
        return tuple(
            make_keys(scope, chain_hashes(chain_root(self.namespace.digest, scope), tokens, self.block_tokens))
        )

    def _root(self, terms: Terms, salt: str | bytes | None) -> BlockKey:
        """What stands before a prompt's first block, as if it were one."""
        scope = self._scope(salt, terms)
        return BlockKey(scope + chain_root(self.namespace.digest, scope))

    def _account(self, found: Found, tokens: int) -> None:
        self.served.update(tokens_by_tier(found.tiers, self.block_tokens))
        self.served["recomputed"] += tokens - len(found.tiers) * self.block_tokens
        served = {"full": found.tiers}
        counts = self._boundaries.counts(len(found.tiers) * self.block_tokens) if found.beside_tiers else ()
        begin = 0
        for group, count in zip(self.shape.groups.beside, counts, strict=False):
            served[group.title] = list(found.beside_tiers[begin : begin + count])
            begin += count
        for title, tiers in served.items():
            self.groups_served.setdefault(title, Counter()).update(tiers)

    def _row(self, ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """The token ids of the one row as a NumPy array, after every check of the arguments and of the model."""
        changed = "with other weights than the model was opened with" if self._settled.weights_changed() else ""
        if changed := changed or self._settled.change():
            raise InvalidRequest(f"a pass would run {changed}: its KV is another one; open another PrefixCache")
        if ids.ndim != 2 or ids.shape[0] != 1:
            raise InvalidRequest(f"token ids of shape {tuple(ids.shape)}: pass one row [1, tokens], a batch row by row")
        if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
            raise InvalidRequest("the attention mask must be all ones: KV behind padding is not this prompt's KV")
        self._traffic.follow_purges()
        tokens = ids[0].cpu().numpy()
        for media, name in self._media.items():
            if (tokens == media).any():
                raise InvalidRequest(
                    f"the tokens contain {media} ({name}): the KV depends on what it stands for, which tokens do not "
                    "tell; run this prompt without kvtier"
                )
        return tokens

    def _refuse_inferred_padding(self, ids: torch.Tensor) -> None:
        pad = getattr(getattr(self.model, "generation_config", None), "pad_token_id", None)
        if pad is not None and bool((ids == pad).any()):
            raise InvalidRequest(
                f"the tokens contain the padding id {pad}, which `generate` masks by default; pass it "
                "attention_mask=torch.ones_like(input_ids), and the mask of the whole output to `store`"
            )

    def _check_cache(self, cache: DynamicCache, tokens: Any) -> None:
        """Raise InvalidRequest unless the cache holds the KV of leading `tokens` in this model's form, as far as can be
        told."""
        full, shape = full_layers(cache), self.shape
        wanted = (1, shape.kv_heads, cache.get_seq_length(), shape.head_size)
        if full != shape.groups.full or wanted[2] > len(tokens):
            raise InvalidRequest(
                f"layers {full} of full attention hold {wanted[2]} tokens, where the model has layers "
                f"{shape.groups.full} and {len(tokens)} tokens were given"
            )
        for index in full if wanted[2] else ():
            for tensor in (cache.layers[index].keys, cache.layers[index].values):
                held = tensor.dtype, tuple(tensor.shape), tensor.device
                if held != (shape.dtype, wanted, shape.device):
                    raise InvalidRequest(
                        f"layer {index} holds {held[0]} {held[1]} on {held[2]}, expected {shape.dtype} {wanted} on "
                        f"{shape.device}; kvtier casts nothing"
                    )
        if problem := self._forwards.problem(cache, tokens):
            raise InvalidRequest(problem)

    # --- tails -------------------------------------------------------------------------------------------------

    def _add_tail(self, tails: Tails, cache: DynamicCache, parent: BlockKey, tokens: Any) -> int:
        """Add the first tokens of a block behind `parent` that begins as `tokens` do to a cache that ends there.
        Returns how many; they are copied out of G1."""
        now = self.clock.read()
        found = tails.longest(parent, tokens[: self.block_tokens], lambda key: bool(self.pool.match([key], now.serve)))
        if found is None:
            return 0
        key, count = found
        slots = self.pool.pin([key], now.serve, now.stamp)
        try:
            for place, index in enumerate(self.shape.groups.full):
                keys, values = self._kv[slots[0], place, :, :, :count].clone()
                cache.layers[index].update(keys[None], values[None])
        finally:
            self.pool.free(slots)
        self.served["g1"] += count
        self.served["recomputed"] -= count
        return count

    def _keep_tails(
        self, tails: Tails, cache: DynamicCache, parents: Sequence[BlockKey], tokens: Any, terms: Terms
    ) -> None:
        """Remember the blocks of a prompt that is stored, by the one before each, and keep what is behind the last: in
        G1, which alone has blocks that are not full. `parents`: what stands before the first block, and the chain."""
        size, length = self.block_tokens, cache.get_seq_length()
        for depth, (parent, key) in enumerate(pairwise(parents)):
            tails.add(parent, tokens[depth * size : (depth + 1) * size], key)
        rest = tokens[(len(parents) - 1) * size : length]
        if not len(rest):
            return
        key = tail_key(parents[-1], rest)

        def write(slots: Sequence[int], start: int) -> None:
            self._kv[slots] = 0
            for place, index in enumerate(self.shape.groups.full):
                layer = cache.layers[index]
                for half, tensor in enumerate((layer.keys, layer.values)):
                    self._kv[slots[0], place, half, :, : len(rest)] = tensor[0, :, length - len(rest) :]

        _, reached = self._chains.keep((key,), terms, self.clock.monotonic(), write)
        if reached:
            tails.add(parents[-1], rest, key)

    # --- tensors -----------------------------------------------------------------------------------------------

    def _write(self, cache: DynamicCache, slots: Sequence[int], start: int) -> None:
        """Cut blocks start … start + len(slots) - 1 out of every layer of full attention into `slots`."""
        begin, end = start * self.block_tokens, (start + len(slots)) * self.block_tokens
        for place, index in enumerate(self.shape.groups.full):
            layer = cache.layers[index]
            for half, tensor in enumerate((layer.keys, layer.values)):
                heads = tensor[0, :, begin:end]
                cut = heads.reshape(heads.shape[0], len(slots), self.block_tokens, heads.shape[2])
                self._kv[slots, place, half] = cut.transpose(0, 1)

    def _cache_of(self, found: Found) -> DynamicCache:
        """A cache object of the model's own kind that holds what was found."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        count, groups, shape = len(found.tiers), self.shape.groups, self.shape
        if count:
            blocks = found.rows.view(shape.dtype).view(count, *shape.block(self.block_tokens))
            # [blocks, layers, 2, heads, block tokens, dim] → per layer, keys and values [1, heads, tokens, dim]
            joined = blocks.permute(1, 2, 3, 0, 4, 5).reshape(
                shape.layers, 2, 1, shape.kv_heads, count * self.block_tokens, shape.head_size
            )
            for index, layer in zip(groups.full, joined, strict=True):
                cache.layers[index].update(layer[0], layer[1])
        if found.beside is not None:
            groups.restore(cache, count * self.block_tokens, found.beside)
        return cache
