"""What the engine connectors share: configuration, identity, scope, per-request control.

    settings  = Settings.parse(extra)                 the engine's connector arguments → kvtier.Config and overrides
    namespace = Namespace(model=model_name(…), weights=weights_of(…), …)
    scope     = Scopes(settings.config).of(salt, adapter, control.terms)
    clock     = PrefillClock(manager.computed, 16)    what the engine's own prefill costs, where `weighs(extra)`
    control   = Controls(settings.config).parse(raw)  what one request asked for
    keys      = engine_keys(scope, hashes)            the engine's own block hashes under our scope

Nothing here knows an engine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvtier.config import Config
from kvtier.errors import ConfigError, IdentityError, InvalidRequest
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SHARED, BlockKey, Scope, make_keys, scope_of
from kvtier.identity.namespace import Namespace
from kvtier.identity.weights import fingerprint
from kvtier.manager.protection import Protection
from kvtier.retention.ranges import ChainTerms, RequestTerms, TokenRange, request_terms
from kvtier.retention.terms import Depth, Terms
from kvtier.units import parse_duration, shorten

log = logging.getLogger(__name__)
T = TypeVar("T")

_CONTROL_KEYS = ("ceiling", "compared_with", "load", "pin", "ranges", "retention", "store")
_ID_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's arguments. `model` and `weights` replace what would be derived; "" derives."""

    config: Config
    model: str = ""
    weights: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], more: Sequence[str] = ()) -> Settings:
        """From the engine's extra configuration: `kvtier_config` (path of the YAML file, or the mapping itself),
        `model`, `weights`; `more` are further keys that the connector reads itself. Reads the file. Raises
        ConfigError, also for a key it does not know."""
        known = {"kvtier_config", "model", "weights", *more}
        if unknown := sorted(set(extra) - known):
            raise ConfigError(f"connector argument {shorten(unknown[0])} is unknown; known: {', '.join(sorted(known))}")
        given = extra.get("kvtier_config")
        if isinstance(given, str):
            config = Config.load(given)
        elif isinstance(given, Mapping):
            config = Config.parse(given)
        else:
            raise ConfigError("connector argument kvtier_config is missing; give the path of kvtier's YAML file")
        texts = {name: extra.get(name, "") for name in ("model", "weights")}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ConfigError(f"connector argument {name} must be a text, got {shorten(value)}")
        return cls(config, **texts)


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────────


def model_name(model: str, given: str = "") -> str:
    """A logical name: `given`, else a hub id as it is, else the last part of a path. Pure.

    Two replicas that keep one checkpoint at different paths share; the weights' fingerprint tells two checkpoints of
    one name apart.
    """
    if given:
        return given
    looks_like_path = model.startswith(("/", "./", "../", "~")) or Path(model).exists()
    return (Path(model).name or "model") if looks_like_path else model


def weights_of(settings: Settings, model: str, revision: str | None = None) -> str:
    """Fingerprint of the weights that the engine loaded: the operator's id, else of the local directory or of the
    hub snapshot. Reads a few MiB of the files (all of them with `weights: full`). Raises IdentityError."""
    if settings.weights:
        return f"id:{settings.weights}"
    where = Path(model)
    if not where.exists():
        where = _snapshot(model, revision)
    return fingerprint(where, settings.config.weights)


def _snapshot(repo: str, revision: str | None) -> Path:
    """Directory of a hub model that is in the local cache. Never goes to the network."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except Exception as error:  # a foreign library's errors are not part of its contract
        raise IdentityError(f"the weights of {repo!r} cannot be found: {error}; set the argument weights") from error
    if not isinstance(found, str):
        raise IdentityError(
            f"the weights of {repo!r} are neither a directory nor in the hub's local cache; "
            "set the connector argument weights to an id that changes with them"
        )
    return Path(found).parent


def adapter_of(path: str | None) -> bytes:
    """Fingerprint of an adapter's weights for the scope; b"" for none. Reads files. Raises IdentityError."""
    return b"" if not path else fingerprint(path).encode("ascii")


def epoch_after_reset(config: Config, namespace: Namespace) -> Namespace:
    """The namespace after the engine announced new weights in place: a random epoch that no other process shares,
    or, with `keep_on_reset`, the same one."""
    return namespace if config.keep_on_reset else namespace.rotated(secrets.token_hex(8))


def engine_keys(scope: Scope, hashes: Sequence[bytes]) -> list[BlockKey]:
    """An engine's own chain hashes under our scope. Pure. Raises IdentityError unless they have 32 bytes."""
    for digest in hashes:
        if len(digest) != HASH_BYTES:
            raise IdentityError(
                f"the engine's block hashes have {len(digest)} bytes, {HASH_BYTES} are needed: "
                "choose a cryptographic one (sha256_cbor)"
            )
    return make_keys(scope, hashes)


# ── one request ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PinWish:
    """A request that wants its prompt pinned: under which name, and for how many seconds."""

    name: str
    ttl: float


@dataclass(frozen=True, slots=True)
class Control:
    """What one request may do: its terms, whether it reads from and writes to the tiers at all, whether its prompt is
    to be pinned, and which earlier request's prompt it is to be compared with ("": none)."""

    terms: Terms
    load: bool = True
    store: bool = True
    ranges: tuple[TokenRange, ...] = ()
    pin: PinWish | None = None
    compared_with: str = ""

    @property
    def request(self) -> RequestTerms:
        """The terms with those of token ranges, as `Scopes.of` wants them."""
        return RequestTerms(self.terms, self.ranges)

    def chain_terms(self, block_tokens: int) -> ChainTerms:
        """The terms by depth, as `Manager.reserve` wants them: once per request, however long it grows."""
        return ChainTerms(self.request, block_tokens)


async def keep_prompt(
    keeper: Protection, scope: Scope, wish: PinWish, prompt: Sequence[BlockKey], block_tokens: int
) -> dict[str, Any]:
    """Pin a prompt as its sender wished, or let its pin of this name end later or sooner. Returns what the sender
    learns. On the cache's loop; never raises InvalidRequest. Names of requests with a scope are that scope's own."""
    name = wish.name if scope == SHARED else f"{scope.hex()[:16]}/{wish.name}"
    held = keeper.pins.get(name)
    try:
        if held is not None and held.chain == tuple(prompt):
            pin = await keeper.extend(name, wish.ttl)
        else:
            pin = await keeper.create(name, prompt, wish.ttl, len(prompt) * block_tokens)
    except InvalidRequest as refused:
        log.warning("a pin is refused: %s", refused)
        return {"refused": True}
    return {"until": pin.until}


class Controls:
    """Reads what requests ask for:

    {"retention": class, "ceiling": "g2" … "g4", "load": bool, "store": bool,
     "ranges": [[start, stop, class], …], "pin": {"name": text, "ttl": "1h"}, "compared_with": request id}
    """

    def __init__(self, config: Config) -> None:
        self._classes = config.terms()
        self._default_name = config.retention.default
        self._default = Control(request_terms(None, self._classes, self._default_name).default)

    def parse(self, raw: object) -> Control:
        """Never raises: a request must not fail because of the cache. What cannot be understood is neither read nor
        stored, since its sender may have asked for less than the default keeps; a warning says why."""
        if raw is None:
            return self._default
        try:
            return self._parse(raw)
        except InvalidRequest as error:
            log.warning("a request is not cached: %s", error)
            return replace(self._default, load=False, store=False)

    def _parse(self, raw: object) -> Control:
        if not isinstance(raw, Mapping):
            raise InvalidRequest(f"kvtier parameters must be a mapping, got {shorten(raw)}")
        if unknown := [key for key in raw if key not in _CONTROL_KEYS]:
            raise InvalidRequest(f"kvtier.{shorten(unknown[0])} is unknown; known: {', '.join(_CONTROL_KEYS)}")
        request = self._terms(raw)
        switches = {name: raw.get(name, True) for name in ("load", "store")}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise InvalidRequest(f"kvtier.{name} must be true or false, got {shorten(value)}")
        compared_with = raw.get("compared_with", "")
        if not isinstance(compared_with, str) or len(compared_with) > _ID_CHARS_MAX:
            raise InvalidRequest(f"kvtier.compared_with must be a request id, got {shorten(compared_with)}")
        pin = _pin_wish(raw["pin"]) if raw.get("pin") is not None else None
        return Control(request.default, **switches, ranges=request.ranges, pin=pin, compared_with=compared_with)

    def _terms(self, raw: Mapping[str, Any]) -> RequestTerms:
        name, ranges, ceiling = raw.get("retention"), raw.get("ranges", ()), raw.get("ceiling")
        if name is not None and not isinstance(name, str):
            raise InvalidRequest(f"kvtier.retention must name a class, got {shorten(name)}")
        if not isinstance(ranges, list | tuple):
            raise InvalidRequest(f"kvtier.ranges must be a list of [start, stop, class], got {shorten(ranges)}")
        request = request_terms(ranges, self._classes, name or self._default_name)
        if ceiling is None:
            return request
        if ceiling not in ("g2", "g3", "g4"):
            raise InvalidRequest(f"kvtier.ceiling must be g2, g3 or g4, got {shorten(ceiling)}")
        depth = Depth[ceiling.upper()]
        shallow = tuple(replace(r, terms=_at_most(r.terms, depth)) for r in request.ranges)
        return RequestTerms(_at_most(request.default, depth), shallow)


def _at_most(terms: Terms, ceiling: Depth) -> Terms:
    return replace(terms, ceiling=min(terms.ceiling, ceiling))


def _pin_wish(raw: object) -> PinWish:
    if not isinstance(raw, Mapping) or set(raw) != {"name", "ttl"} or not all(isinstance(v, str) for v in raw.values()):
        raise InvalidRequest(
            'kvtier.pin must be {"name": text, "ttl": duration}, such as {"name": "manual", "ttl": "1h"}'
        )
    return PinWish(raw["name"], parse_duration(raw["ttl"]))


class Scopes:
    """Who may share a request's blocks. Pure."""

    def __init__(self, config: Config) -> None:
        self._secret = config.scope_secret
        self._deny = config.security.salt == "deny"

    def of(self, salt: str | bytes | None, adapter: bytes, terms: Terms | RequestTerms) -> Scope | None:
        """The scope, or None where the request may not be cached at all (no salt, and `security.salt: deny`).

        `terms`: those of the whole request (`Control.request`), since an isolated class of a part isolates all of it.
        """
        if salt is None and self._deny:
            return None
        request = RequestTerms(terms) if isinstance(terms, Terms) else terms
        return scope_of(salt, adapter, request.isolated, secret=self._secret)


# ── towards the engine ──────────────────────────────────────────────────────────────────────────────────────────────


def guarded(call: Callable[..., T], *arguments: Any, fallback: T) -> T:
    """The call's answer, or `fallback`: an error here must cost a hit, not the engine."""
    try:
        return call(*arguments)
    except Exception:
        log.exception("kvtier: %s failed and is answered as without a cache", getattr(call, "__name__", call))
        return fallback


def seconds(extra: Mapping[str, Any], name: str, default: float) -> float:
    """A connector argument that is a time: a number of seconds, or a text such as 200ms. Raises InvalidRequest."""
    value = extra.get(name)
    if value is None:
        return default
    return float(value) if isinstance(value, int | float) else parse_duration(value)


# ── what prefill costs ──────────────────────────────────────────────────────────────────────────────────────────


def weighs(extra: Mapping[str, Any]) -> bool:
    """The connector argument `recompute`: whether loads are weighed against prefill (auto) or always made (never).
    Raises ConfigError."""
    recompute = extra.get("recompute", "auto")
    if recompute not in ("auto", "never"):
        raise ConfigError(f"connector argument recompute must be auto or never, got {shorten(recompute)}")
    return bool(recompute == "auto")


class PrefillClock:
    """Tells a manager what the engine's prefill costs, which loading is weighed against.

    Engines launch a batch before the one before it has ended: time until then is the earlier one's. Short batches are
    left out, since a step has a cost of its own that does not grow with its tokens.
    """

    def __init__(self, computed: Callable[[int, float], None], block_tokens: int, least_blocks: int = 8) -> None:
        self._computed = computed
        self._block_tokens = block_tokens
        self._least = least_blocks
        self._free_at = 0.0

    def ran(self, tokens: int, began: float, ended: float) -> None:
        """A batch that computed `tokens` of prompts, and nothing else, was launched at `began` and over at `ended`,
        in monotonic seconds; 0 tokens for every other kind of batch."""
        seconds, self._free_at = ended - max(began, self._free_at), ended
        blocks = tokens // self._block_tokens
        if blocks >= self._least and seconds > 0:
            self._computed(blocks, seconds)
