"""What is kept of prompts for people, and that prompts that are long to read keep no event loop."""

import asyncio
import json
from array import array
from collections.abc import Iterable
from typing import Any

import pytest

from kv_protocol.body_limits import Body
from kv_protocol.hashing import Hashing
from kv_protocol.openai.requests import CHAT, COMPLETIONS, decode_inbound
from kv_runtime.text.byte_model import ByteText
from router.prompt import chains
from router.prompt.chains import HEAD_TOKENS, TAIL_TOKENS, EncodedPrompt, KeptPrompts, PromptText
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


def words(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def ids(count: int) -> bytes:
    return array("I", range(count)).tobytes()


def test_a_short_prompt_is_kept_whole_a_long_one_without_its_middle_and_one_without_ids_is_not_kept() -> None:
    kept = KeptPrompts(words)
    for decision_id, count in (("short", 3), ("exact", HEAD_TOKENS + TAIL_TOKENS), ("long", 2000), ("image", 0)):
        kept.keep(decision_id, ids(count))
    assert kept.text("short") == PromptText("0 1 2", "", 0)
    assert kept.text("exact") == PromptText(words(range(HEAD_TOKENS)), words(range(512, 1024)), 0)
    assert kept.text("long") == PromptText(words(range(HEAD_TOKENS)), words(range(1488, 2000)), 976)
    assert (kept.text("image"), kept.text("other")) == (None, None)
    assert (kept.excerpt("short", 1, 9), kept.excerpt("short", 3, 9)) == ("1 2", None)


def test_the_oldest_prompts_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "PROMPTS_MAX", 2)
    kept = KeptPrompts(words)
    for decision_id in "abc":
        kept.keep(decision_id, ids(1))
    assert [kept.text(decision_id) is not None for decision_id in "abc"] == [False, True, True]
