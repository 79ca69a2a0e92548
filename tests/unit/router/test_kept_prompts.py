"""What is kept of prompts for people, and that prompts that are long to read keep no event loop."""

import asyncio
import json
from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.body_limits import Body
from kv_protocol.codec import pack_u64
from kv_protocol.hashing import Hashing
from kv_protocol.openai.requests import CHAT, COMPLETIONS, decode_inbound
from kv_runtime.text.byte_model import ByteText
from router.decision.kept_prompts import HEAD_TOKENS, TAIL_TOKENS, KeptPrompts, PromptText
from router.prompt.chains import EncodedPrompt
from router.prompt.encoding_pool import EncodingPool
from router.prompt.prompts import ModelPrompts
from router.request.reading import ReadBody

_LONG = 200_000
_SAID = [{"role": "user", "content": "hello"}]
_BLOCKS = Hashing(4)


def _read(path: str, **fields: Any) -> ReadBody:
    body = json.dumps({"model": "m"} | fields).encode()
    return Body(body), decode_inbound(path, body)


_LONG_ONES = {
    "ids as a prompt": _read(COMPLETIONS, prompt=[7] * _LONG),
    "ids as token_data": _read(CHAT, messages=_SAID, nvext={"token_data": [7] * _LONG}),
    "documents": _read(CHAT, messages=_SAID, documents=[{"text": "x" * 2 * _LONG}]),
    "options of a template": _read(CHAT, messages=_SAID, chat_template_kwargs={"more": "x" * 2 * _LONG}),
}


@pytest.mark.parametrize("read", _LONG_ONES.values(), ids=_LONG_ONES)
async def test_what_is_long_to_read_is_left_to_a_thread(read: ReadBody) -> None:
    made = ModelPrompts(ByteText()).prompt(*read, _BLOCKS)
    assert isinstance(made, asyncio.Future)
    made.cancel()


async def test_ids_that_a_thread_reads_are_the_prompt() -> None:
    prompt = await _made_by_a_thread(_LONG_ONES["ids as token_data"])
    assert (prompt.token_count, prompt.ids) == (_LONG, b"\7\0\0\0" * _LONG)


async def test_ids_that_are_none_are_not_rendered_by_a_thread_either() -> None:
    made = await _made_by_a_thread(_read(COMPLETIONS, prompt=[7] * _LONG + [-1]))
    assert made.unrendered == f"prompt[{_LONG}]"


class _Panic(BaseException):
    """What a Rust library raises: no `Exception`."""


async def test_a_thread_survives_whatever_its_work_raises() -> None:
    def panics() -> None:
        raise _Panic("at this text")

    pool = EncodingPool(1, 1 << 20)
    with pytest.raises(RuntimeError, match="_Panic: at this text"):
        await pool.submit(panics, 1)
    assert await pool.submit(lambda: "lives", 1) == "lives"


async def _made_by_a_thread(read: ReadBody) -> EncodedPrompt:
    made = ModelPrompts(ByteText()).prompt(*read, _BLOCKS)
    assert isinstance(made, asyncio.Future)
    return await made


BYTES_MAX = 40_000
HASHES = bytes(range(16))


def words(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def ids(count: int) -> bytes:
    return array("I", range(count)).tobytes()


def test_a_short_prompt_is_kept_whole_and_a_long_one_without_its_middle() -> None:
    kept = KeptPrompts(words)
    kept.keep("short", ids(3), HASHES)
    kept.keep("exact", ids(HEAD_TOKENS + TAIL_TOKENS), HASHES)
    kept.keep("long", ids(2000), HASHES)
    assert kept.text("short", HASHES) == PromptText("0 1 2", "", 0)
    assert kept.text("exact", HASHES) == PromptText(words(range(HEAD_TOKENS)), words(range(512, 1024)), 0)
    assert kept.text("long", HASHES) == PromptText(words(range(HEAD_TOKENS)), words(range(1488, 2000)), 976)
    assert kept.text("other", HASHES) is None


def test_a_decision_on_another_prompt_under_the_same_id_has_no_text() -> None:
    kept = KeptPrompts(words)
    kept.keep("job", ids(3), HASHES[:8])
    assert kept.text("job", HASHES) is not None, "resumed on another worker, with what was generated"
    kept.keep("job", ids(4), HASHES[8:])
    assert kept.text("job", HASHES[:8]) is None
    assert kept.text("job", HASHES[8:]) == PromptText("0 1 2 3", "", 0)


def test_of_prompts_that_no_hash_tells_apart_none_is_shown() -> None:
    kept = KeptPrompts(words)
    for count in (3, 3):
        kept.keep("job", ids(count), b"")
        assert kept.text("job", b"") is not None
    for count in (4, 4, 3):
        kept.keep("job", ids(count), b"")
        assert kept.text("job", b"") is None


def test_a_prompt_without_ids_is_not_kept() -> None:
    kept = KeptPrompts(words)
    kept.keep("image", b"", HASHES)
    assert (kept.text("image", HASHES), kept.size_bytes) == (None, 0)


@given(st.lists(st.tuples(st.sampled_from([f"r{n}" for n in range(30)]), st.integers(1, 3000)), max_size=60))
def test_the_newest_prompts_are_kept_within_the_bound(sent: list[tuple[str, int]]) -> None:
    kept, newest = KeptPrompts(words, BYTES_MAX), dict[str, int]()
    for request_id, count in sent:
        kept.keep(request_id, ids(count), pack_u64([count]))
        newest.pop(request_id, None)
        newest[request_id] = count
        assert kept.size_bytes <= BYTES_MAX
        assert kept.text(request_id, pack_u64([count])) is not None
    found = {request_id: kept.text(request_id, pack_u64([count])) for request_id, count in newest.items()}
    are_kept = [text is not None for text in found.values()]
    assert are_kept == sorted(are_kept), "the oldest are dropped first"
    for request_id, text in found.items():
        if text is not None:
            assert len(f"{text.head} {text.tail}".split()) + text.omitted_tokens == newest[request_id]
