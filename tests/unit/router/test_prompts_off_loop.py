"""Prompts that are long to read keep no event loop, whatever they are made of."""

import asyncio
import json
from typing import Any

import pytest

from kv_protocol.body_limits import Body
from kv_protocol.hashing import Hashing
from kv_protocol.openai.requests import CHAT, COMPLETIONS, decode_inbound
from kv_runtime.text.byte_model import ByteText
from router.prompt.chains import EncodedPrompt
from router.prompt.encoding_pool import EncodingPool
from router.prompt.prompts import ModelPrompts
from router.request.reading import ReadBody
from tests.support.parts import at_work

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
    async with at_work(*pool.parts(0)):
        with pytest.raises(RuntimeError, match="_Panic: at this text"):
            await pool.submit(panics, 1)
        assert await pool.submit(lambda: "lives", 1) == "lives"


async def _made_by_a_thread(read: ReadBody) -> EncodedPrompt:
    prompts = ModelPrompts(ByteText())
    made = prompts.prompt(*read, _BLOCKS)
    assert isinstance(made, asyncio.Future)
    async with at_work(*prompts.pool.parts(0)):
        await asyncio.wait([made])
    return made.result()
