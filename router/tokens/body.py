"""A client's body on its way to a worker: all its bytes, and the token ids of its prompt before them."""

import base64

_OPENING, _CLOSING = b'{"kv_prompt_ids":"', b'",'


def with_prompt_ids(body: bytes, ids: bytes, encoded: bytes = b"") -> tuple[bytes | memoryview, ...]:
    """Return the JSON object `body` with `kv_prompt_ids` as its first key, in parts; else byte for byte as it was.

    `ids` are little-endian u32s, `encoded` the same in base64 where somebody has it; of no ids, those of a prompt with
    images, nothing is said. The body is not copied; white space before the object is left out.
    """
    if not ids:
        return (memoryview(body),)
    rest = memoryview(body)[body.index(b"{") + 1 :]
    return (_OPENING, encoded or base64.b64encode(ids), _CLOSING, rest)
