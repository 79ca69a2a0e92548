"""A long body that is decoded without its prompt is read as one that is decoded whole."""

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kv_protocol.openai.parts import LONG_BYTES
from kv_protocol.openai.requests import CHAT, COMPLETIONS, RequestInvalid, decode_inbound
from kv_protocol.openai.responses import RESPONSES
from router.request.reading import decode_request

PATHS = (CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings", "/v1/route")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(-1, 1)
    | st.text(st.sampled_from('ab"\\[]{},:\né😀'), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", '"', "}"]), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["model", "messages", "prompt", "input", "stream", "n", "nvext", "tools", "max_tokens", 'a"b', "a\\"]
)
EDITS = st.tuples(
    st.integers(0, 400), st.integers(0, 3), st.sampled_from([b"", b'"', b"\\", b"}", b"]", b",", b"\xff", b"{", b" "])
)


def outcome(decode: Any, path: str, body: bytes) -> Any:
    try:
        read = decode(path, body)
    except RequestInvalid as error:
        return str(error)
    return type(read), {
        key: bytes(value) if isinstance(value, msgspec.Raw) else value
        for key, value in msgspec.structs.asdict(read).items()
    }


@given(
    st.sampled_from(PATHS),
    st.lists(st.tuples(KEYS, VALUES), max_size=6),
    st.booleans(),
    st.none() | EDITS,
    st.integers(0, 6),
)
@example(
    path="/v1/chat/completions", fields=[("messages", None), ("stream", None)], is_ascii=True, edit=None, padding_at=0
)
def test_a_long_body_is_read_as_a_whole_one(
    path: str, fields: list[tuple[str, Any]], is_ascii: bool, edit: tuple[int, int, bytes] | None, padding_at: int
) -> None:
    texts = [
        f"{json.dumps(key)} :{json.dumps(value, ensure_ascii=is_ascii)}" for key, value in [("model", "m"), *fields]
    ]
    texts.insert(padding_at, f'"metadata": "{"x" * LONG_BYTES}"')
    body = ("{" + " ,".join(texts) + "}").encode()
    if edit is not None:
        at, removed, added = edit
        body = body[:at] + added + body[at + removed :]
    whole, found = outcome(decode_inbound, path, body), outcome(decode_request, path, body)
    if not isinstance(whole, str) or isinstance(found, str):  # else the prompt is at fault, which was not read
        assert found == whole
