"""Errors of the wire: a peer sent something invalid. Reject it, count it, mark the rank stale; never crash."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

FOUND_CHARACTERS_MAX = 80
"""An error shows at most this many characters of a found value or key."""
_REASON_CHARACTERS_MAX = 300
_Message = TypeVar("_Message")


def shortened(text: str, characters_max: int = FOUND_CHARACTERS_MAX) -> str:
    """Return `text`, cut after `characters_max` with `...`."""
    return text if len(text) <= characters_max else f"{text[:characters_max]}..."


class ProtocolError(Exception):
    """A peer broke the protocol. The message names the field, what was found and what is allowed."""


class MalformedMessage(ProtocolError):
    """Bytes that are not a message: reading stopped at `offset` because of `reason`."""

    def __init__(self, offset: int, reason: str) -> None:
        reason = shortened(reason, _REASON_CHARACTERS_MAX)
        super().__init__(f"malformed at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class LimitExceeded(ProtocolError):
    """A well-formed value outside its allowed range."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {self.shown(found)}, allowed {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed

    @staticmethod
    def shown(found: object) -> str:
        """Return the found value as the message shows it."""
        return shortened(repr(found))


UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError, LimitExceeded)
"""What decoding foreign bytes may raise: msgspec's errors (`RecursionError`: nested too deeply) and our own checks."""


def decoder_of(
    name: str, decode: Callable[[bytes], _Message], bytes_max: int | None = None
) -> Callable[[bytes], _Message]:
    """Return a function that decodes a message, or raises `MalformedMessage` with its name, the field and the reason.

    A message of more than `bytes_max` bytes is refused unread.
    """

    def decoded(data: bytes) -> _Message:
        if bytes_max is not None and len(data) > bytes_max:
            raise MalformedMessage(bytes_max, f"{name}: {len(data)} bytes, at most {bytes_max} allowed")
        try:
            return decode(data)
        except UNDECODABLE as error:
            raise MalformedMessage(0, f"{name}: {error}") from error

    return decoded
