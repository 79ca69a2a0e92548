"""Keys of a request that stay bytes until they are needed."""

from typing import Any, Generic, TypeVar

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.errors import explained

ABSENT = msgspec.Raw()
"""A key that the client did not send."""
_NULL = b"null"
_NOTHING = (b"", _NULL)


def is_given(option: msgspec.Raw) -> bool:
    """Return whether the client sent the key, and not as null."""
    return option is not ABSENT and (len(option) > len(_NULL) or bytes(option) not in _NOTHING)


Read = TypeVar("Read")


class RawPart(Generic[Read]):
    """Decodes the bytes of one key on demand."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401 - a type as msgspec takes it
        self._kind = kind
        self._decoder: msgspec.json.Decoder[Read] = msgspec.json.Decoder(kind)

    def read(self, raw: msgspec.Raw, key: str) -> Read:
        """Decode the bytes; raise `RequestInvalid`, which names the place under `key`."""
        try:
            return self._decoder.decode(raw)
        except UNDECODABLE as error:
            raise explained(error, raw, self._kind, key) from error


class OptionalPart(RawPart[Read | None]):
    """The same for a key that may be absent, or null."""

    def read(self, raw: msgspec.Raw, key: str) -> Read | None:
        """Decode the bytes, None if there are none; raise `RequestInvalid`."""
        return super().read(raw, key) if is_given(raw) else None
