"""The `kvtier` parameter of a request: its terms, whether it reads and writes, what to pin, whom it shares with.

{"retention": class, "ceiling": "g2" … "g4", "load": bool, "store": bool,
 "ranges": [[start, stop, class], …], "pin": {"name": text, "ttl": "1h"}, "compared_with": request id,
 "session": text, "usage": bool, "hints": see kvtier.retention.hints}
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvtier.config import Config
from kvtier.errors import InvalidRequest
from kvtier.identity.keys import Scope, scope_of
from kvtier.retention.hints import KEYS, NO_HINTS, SESSION_CHARS_MAX, Hints, read_hints
from kvtier.retention.ranges import ChainTerms, RequestTerms, TokenRange, request_terms
from kvtier.retention.terms import Depth, Terms
from kvtier.units import parse_duration

log = logging.getLogger(__name__)

_KEYS = ("ceiling", "compared_with", "hints", "load", "pin", "ranges", "retention", "session", "store", "usage")
_SWITCHES = {"load": True, "store": True, "usage": False}
_ID_CHARS_MAX = 256
VALUES_MAX, CHARS_MAX, INT_BITS_MAX = 2048, 1024, 64
"""Of one request's parameters: values in all, characters of a text, bits of a number. They are read on the scheduler's
thread, so more is refused unread."""


_PARAMETERS_MAX = 64  # more than there are; so no large mapping is copied


def gathered(params: object, envelope: object, session: object) -> object:
    """A request's `kvtier` parameter, with the hints beside it in `params`, the engine's own `envelope` of hints and
    the engine's name of the `session`; None for none of them. Pure; looks at no more values than `Controls.parse`."""
    given = params if isinstance(params, Mapping) else {}
    own, hints = given.get("kvtier"), {key: given[key] for key in KEYS if key in given}
    if envelope is not None:
        hints["kv_hints"] = _shallow(envelope)
    beside: dict[str, Any] = {"hints": hints} if hints else {}
    if isinstance(session, str):
        beside["session"] = session[:SESSION_CHARS_MAX]
    if not beside or not (own is None or (isinstance(own, Mapping) and len(own) <= _PARAMETERS_MAX)):
        return own  # where it is no mapping, or too large a one, that is a fault that its reader names
    return {**beside, **(own or {})}


def _shallow(envelope: object) -> object:
    """vLLM's or SGLang's envelope as mappings, but for what lies in payloads: that is JSON."""
    if not isinstance(envelope, msgspec.Struct):
        return envelope
    fields = msgspec.structs.asdict(envelope)
    actions = fields.get("actions")
    if isinstance(actions, list | tuple):
        some = actions[: VALUES_MAX + 1]
        fields["actions"] = [msgspec.structs.asdict(one) if isinstance(one, msgspec.Struct) else one for one in some]
    return fields


@dataclass(frozen=True, slots=True)
class PinRequest:
    """The prompt is to be pinned under this name, for so many seconds."""

    name: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Control:
    """One request's parameters. `compared_with` is the earlier request whose prompt it is compared with, `session` the
    conversation or agent that it is of ("": none). `usage`: its sender wants to know what was cached and stored."""

    terms: Terms
    load: bool = True
    store: bool = True
    ranges: tuple[TokenRange, ...] = ()
    pin: PinRequest | None = None
    compared_with: str = ""
    session: str = ""
    usage: bool = False
    hints: Hints = NO_HINTS

    @property
    def request(self) -> RequestTerms:
        """The terms with those of token ranges, for `Scopes.of`."""
        return RequestTerms(self.terms, self.ranges)

    def chain_terms(self, block_tokens: int) -> ChainTerms:
        """The terms by depth, for `Manager.reserve`: once per request, however long it grows."""
        return ChainTerms(self.request, block_tokens)


class Controls:
    """Reads the parameters of requests under one configuration."""

    def __init__(self, config: Config) -> None:
        self._classes = config.terms()
        self.hint_share = config.retention.hints
        self._default_name = config.retention.default
        self._default = Control(request_terms(None, self._classes, self._default_name).default)

    def parse(self, raw: object) -> Control:
        """Never raises: a request must not fail because of the cache. One whose parameters are wrong neither reads nor
        stores, since its sender may have asked for less than the default keeps; a warning says why."""
        if raw is None:
            return self._default
        try:
            return self._parse(raw)
        except InvalidRequest as error:
            log.warning("a request is not cached: %s", error)
            return replace(self._default, load=False, store=False)

    def _parse(self, raw: object) -> Control:
        if not isinstance(raw, Mapping):
            raise InvalidRequest(f"kvtier parameters must be a mapping, got {_told(raw)}")
        unknown = next((key for key in raw if key not in _KEYS), None)
        if unknown is not None:
            raise InvalidRequest(f"kvtier: no key is {_told(unknown, _KEYS)}")
        for key, value in raw.items():
            _check_size(key, value)
        hints = _hints(raw.get("hints"))
        request = self._terms(raw, hints)
        switches = {name: raw.get(name, default) for name, default in _SWITCHES.items()}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise InvalidRequest(f"kvtier.{name} must be true or false, got {_told(value)}")
        compared_with = raw.get("compared_with", "")
        if not isinstance(compared_with, str) or len(compared_with) > _ID_CHARS_MAX:
            raise InvalidRequest(f"kvtier.compared_with must be a request id, got {_told(compared_with)}")
        pin = _pin_request(raw["pin"]) if raw.get("pin") is not None else None
        session = raw.get("session", "")
        if not isinstance(session, str) or len(session) > _ID_CHARS_MAX:
            raise InvalidRequest(f"kvtier.session must be a text, got {_told(session)}")
        return Control(
            request.default, **switches, ranges=request.ranges, pin=pin, compared_with=compared_with,
            session=session or hints.session, hints=hints,
        )  # fmt: skip

    def _terms(self, raw: Mapping[str, Any], hints: Hints) -> RequestTerms:
        """The request's own classes; else those that its hints ask for."""
        name, ranges, ceiling = raw.get("retention"), raw.get("ranges", ()), raw.get("ceiling")
        if name is None and not ranges:
            name, ranges = hints.retention or None, hints.ranges
        if name is not None and not isinstance(name, str):
            raise InvalidRequest(f"kvtier.retention must name a class, got {_told(name)}")
        if not isinstance(ranges, list | tuple):
            raise InvalidRequest(f"kvtier.ranges must be a list of [start, stop, class], got {_told(ranges)}")
        self._check_names(name, *(each[2] for each in ranges if isinstance(each, list | tuple) and len(each) == 3))
        request = request_terms(ranges, self._classes, name or self._default_name)
        if ceiling is None:
            return request
        if ceiling not in ("g2", "g3", "g4"):
            raise InvalidRequest(f"kvtier.ceiling must be g2, g3 or g4, got {_told(ceiling)}")
        depth = Depth[ceiling.upper()]
        shallow = tuple(replace(r, terms=_at_most(r.terms, depth)) for r in request.ranges)
        return RequestTerms(_at_most(request.default, depth), shallow)

    def _check_names(self, *given: object) -> None:
        known = [terms.name for terms in self._classes]
        for name in given:
            if isinstance(name, str) and name not in known:
                raise InvalidRequest(f"kvtier: no retention class is {_told(name, known)}")


def _told(value: object, known: Collection[str] = ()) -> str:
    """A wrong value, where some are known, as the log has it: a client may have put its salt, or the prompt, there."""
    if not isinstance(value, str):
        return f"a value of type {type(value).__name__}"
    near = difflib.get_close_matches(value[:32], known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"a text of {len(value)} characters{meant}{'; known: ' if known else ''}{', '.join(sorted(known))}"


def _check_size(key: str, raw: object) -> None:
    """Raises InvalidRequest for more than a sender needs, after looking at VALUES_MAX values."""
    if key == "hints" and isinstance(raw, Mapping):
        raw = {name: raw[name] for name in KEYS if name in raw}  # others are not read
    left, seen = [raw], 0
    while left:
        value = left.pop()
        if isinstance(value, str):
            if len(value) > CHARS_MAX or not _is_unicode(value):
                raise InvalidRequest(f"kvtier.{key}: a text has at most {CHARS_MAX} characters of Unicode")
        elif isinstance(value, int):
            if value.bit_length() > INT_BITS_MAX:
                raise InvalidRequest(f"kvtier.{key}: a number has at most {INT_BITS_MAX} bits")
        elif isinstance(value, dict | list | tuple | Mapping):  # the last costs most to ask for
            seen += len(value)
            if seen > VALUES_MAX:
                raise InvalidRequest(f"kvtier.{key} has more than {VALUES_MAX} values; send fewer")
            left.extend(value if isinstance(value, list | tuple) else value.values())


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair: no answer could repeat it
        return False


def _hints(raw: object) -> Hints:
    if raw is None:
        return NO_HINTS
    if not isinstance(raw, Mapping):
        raise InvalidRequest(f"kvtier.hints must be a mapping, got {_told(raw)}")
    return read_hints(raw)


def _at_most(terms: Terms, ceiling: Depth) -> Terms:
    return replace(terms, ceiling=min(terms.ceiling, ceiling))


def _pin_request(raw: object) -> PinRequest:
    if not isinstance(raw, Mapping) or set(raw) != {"name", "ttl"} or not all(isinstance(v, str) for v in raw.values()):
        raise InvalidRequest(
            'kvtier.pin must be {"name": text, "ttl": duration}, such as {"name": "manual", "ttl": "1h"}'
        )
    try:
        return PinRequest(raw["name"], parse_duration(raw["ttl"]))
    except InvalidRequest:
        raise InvalidRequest("kvtier.pin.ttl must be a duration of at most 10 years, such as 1h") from None


class Scopes:
    """The scope of a request: only requests of one scope share blocks. Pure."""

    def __init__(self, config: Config) -> None:
        self._secret = config.scope_secret
        self._deny = config.security.salt == "deny"

    def of(self, salt: str | bytes | None, adapter: bytes, terms: Terms | RequestTerms) -> Scope | None:
        """The scope, or None where the request may not be cached at all (no salt, and `security.salt: deny`). `terms`
        are the whole request's (`Control.request`): an isolated class of a part isolates all of it."""
        if salt is None and self._deny:
            return None
        request = RequestTerms(terms) if isinstance(terms, Terms) else terms
        return scope_of(salt, adapter, request.isolated, secret=self._secret)
