"""Recorded uses of objects, with a proof: who has no key cannot make an object live longer.

The proof is a tag over the object's name below the prefix, its salt and the time. The salt names the payload, as the
ETag would; but some servers give a copy of an object onto itself another ETag.
"""

from __future__ import annotations

from typing import cast

from kvtier.errors import CorruptError
from kvtier.keyring import KEY_ID_BYTES, TAG_BYTES, Keyring, UnknownKey
from kvtier.retention.lifetime import FUTURE_S
from kvtier.tiers.objects.bucket.protocol import RecordedUse, Stat
from kvtier.tiers.objects.frame import Frame
from kvtier.times import Wall

_PURPOSE = "use"


class UseProofs:
    """Makes and checks proofs, for the objects below a prefix. Without a trusted keyring there are none."""

    def __init__(self, keyring: Keyring, root: str) -> None:
        self._keyring = keyring
        self._root = root

    def prove(self, name: str, frame: Frame, used: Wall) -> Wall:
        """The time with its proof, rounded to what is stored."""
        if not self._keyring.trusted:
            return used
        used = Wall(round(used, 6))
        id, tag = self._keyring.tag(_PURPOSE, self._content(name, frame, used))
        return cast(Wall, RecordedUse(used, (id + tag).hex()))

    def believes(self, name: str, frame: Frame, used: Wall) -> bool:
        """Whether a replica recorded this use of this object; true without a trusted keyring."""
        if not self._keyring.trusted:
            return True
        try:
            proof = bytes.fromhex(getattr(used, "proof", ""))
            if len(proof) != KEY_ID_BYTES + TAG_BYTES:
                return False
            self._keyring.check(proof[:KEY_ID_BYTES], proof[KEY_ID_BYTES:], _PURPOSE, self._content(name, frame, used))
        except (ValueError, CorruptError, UnknownKey):
            return False
        return True

    def last_use(self, frame: Frame, stat: Stat, wall_s: Wall) -> Wall:
        """The last use of an object, by its header and by what the server keeps with it. A use from the future was
        recorded by a clock that is wrong, or forged: it would keep the object for ever."""
        latest = Wall(wall_s + FUTURE_S)
        used = frame.life.last_use
        if used > latest:
            used = max((stamp.created for stamp in frame.life.stamps if stamp.created <= latest), default=used)
        if stat.used is not None and self.believes(stat.name, frame, stat.used):
            recorded = Wall(min(stat.used, getattr(stat.used, "latest", stat.used)))
            if recorded <= latest:
                used = max(recorded, used)
        return used

    def _content(self, name: str, frame: Frame, used: Wall) -> bytes:
        return frame.salt + f"{used:.6f} {name.removeprefix(self._root)}".encode()
