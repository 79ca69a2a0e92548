"""A client's body on its way to a worker, with the token ids of its prompt inserted before its first key."""

import base64

from kv_protocol.body_limits import Bytes

_SLICE = 3 << 18
"""Bytes, in threes, that become base64 in one call."""
_OPENING, _CLOSING = b'{"kv_prompt_ids":"', b'",'


def with_prompt_ids(body: Bytes, ids: bytes, encoded: bytes = b"") -> tuple[Bytes | memoryview, ...]:
    """Return the JSON object `body` with `kv_prompt_ids` as its first key, in parts; unchanged in all other bytes.

    `ids` are little-endian u32s, `encoded` the same in base64 if known. Without ids (a prompt with images) nothing
    is inserted. The body is not copied; white space before the object is left out.
    """
    if not ids:
        return (memoryview(body),)
    rest = memoryview(body)[body.index(b"{") + 1 :]
    return (_OPENING, encoded or base64_of(ids), _CLOSING, rest)


def base64_of(data: Bytes | memoryview) -> bytes:
    """Encode `data` in base64, in calls that are short enough for a thread beside the event loop."""
    if len(data) <= _SLICE:
        return base64.b64encode(data)
    view = memoryview(data)
    return b"".join([base64.b64encode(view[at : at + _SLICE]) for at in range(0, len(view), _SLICE)])
