"""A client's body on its way to a worker, with the token ids of its prompt inserted before its first key."""

import base64

from kv_protocol.body_limits import Bytes

_OPENING, _CLOSING = b'{"kv_prompt_ids":"', b'",'


def with_prompt_ids(body: Bytes, ids: bytes) -> tuple[Bytes | memoryview, ...]:
    """Return the JSON object `body` in parts, with `kv_prompt_ids` as its first key; all behind it unchanged.

    `ids` are little-endian u32s. Without ids (a prompt with images) nothing is inserted. The body is not copied; white
    space before the object is left out.
    """
    if not ids:
        return (memoryview(body),)
    rest = memoryview(body)[body.index(b"{") + 1 :]
    return (_OPENING, base64.b64encode(ids), _CLOSING, rest)
