"""Prompts as tokens: the same ids and hashes as the worker's, and the client's bytes otherwise as they were."""

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from kv_protocol.body_limits import Body
from kv_protocol.codec import pack_u64
from kv_protocol.hashing import (
    HASH_SCHEMES,
    TEXT_SCHEME,
    Hashing,
    pack_tokens,
    sequence_hashes,
    unpack_tokens,
)
from kv_protocol.openai.requests import (
    CHAT,
    COMPLETIONS,
    ChatRequest,
    Request,
    RequestInvalid,
    decode_chat,
    decode_completion,
    decode_inbound,
)
from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.loading import UnreadText, load_text
from router.prompt.chains import EncodedPrompt, with_prompt_ids
from router.prompt.encoding_pool import EncodersBusy, EncodingPool
from router.prompt.prompts import OFF_LOOP_BYTES, ModelPrompts
from router.request.reading import ReadBody
from tests.support.chat_ids import chat_ids
from tests.unit.kv_runtime.model_files import LLAMA_TEMPLATE, QWEN_TEMPLATE, llama_like, qwen_like, write_model

TEXT = ByteText()
FOURS = Hashing(4)
HELLO = [{"role": "user", "content": "hello, worker"}]


def read(path: str, body: bytes) -> ReadBody:
    return Body(body), decode_inbound(path, body)


def chat(**fields: Any) -> ReadBody:
    return read(CHAT, json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def completion(prompt: Any, **fields: Any) -> ReadBody:
    return read(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt} | fields).encode())


def prompt_of(asked: ReadBody, hashing: Hashing = FOURS, lora: str = "") -> EncodedPrompt:
    made = ModelPrompts(TEXT).prompt(*asked, hashing, lora)
    assert isinstance(made, EncodedPrompt)
    return made


def ids_of(asked: ReadBody) -> list[int]:
    return unpack_tokens(prompt_of(asked).ids)


def as_worker(request: Request) -> list[int]:
    """Return the ids that an agent computes on: those it is sent, else its own."""
    if request.kv_prompt_ids is not None:
        return unpack_tokens(request.kv_prompt_ids)
    if isinstance(request, ChatRequest):
        return chat_ids(TEXT, request.messages, **request.template_options)
    (prompt,) = request.read_prompts()
    return TEXT.encode(prompt) if isinstance(prompt, str) else unpack_tokens(prompt)


@pytest.mark.parametrize("text", [llama_like, qwen_like])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "none"}, {"tool_choice": "required"}])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_tools_and_template_variables_make_the_same_prompt_in_router_and_worker(
    tmp_path: Path, text: Callable[[], Tokenizer], choice: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    template = LLAMA_TEMPLATE if text is llama_like else QWEN_TEMPLATE
    model = load_text(str(write_model(tmp_path, text(), template)))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    messages: list[dict[str, Any]] = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "warm"})
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"model": "m", "messages": messages, "tools": tools, "chat_template_kwargs": kwargs, **choice}
    raw = json.dumps(body).encode()
    made = ModelPrompts(model).prompt(*read(CHAT, raw), FOURS, "")
    assert isinstance(made, EncodedPrompt)
    request = decode_chat(raw)
    as_rendered = chat_ids(model, request.messages, **request.template_options)
    assert unpack_tokens(made.ids) == as_rendered
    bare = chat_ids(model, messages)
    assert as_rendered != bare


def test_a_chat_is_encoded_with_what_the_client_says_of_its_end() -> None:
    assert ids_of(chat(add_generation_prompt=False)) == chat_ids(TEXT, HELLO, add_generation_prompt=False)
    assert ids_of(chat(continue_final_message=True)) == chat_ids(TEXT, HELLO, continue_final_message=True)


@pytest.mark.parametrize(
    "asked", [chat(nvext={"token_data": [1, 2, 3]}), completion("x", nvext={"token_data": [1, 2, 3]})]
)
def test_token_data_comes_in_place_of_messages_and_text(asked: ReadBody) -> None:
    assert ids_of(asked) == [1, 2, 3]


@pytest.mark.parametrize("salt", [None, "", "tenant-1"])
@pytest.mark.parametrize("lora", ["", "adapter"])
def test_the_hashes_are_those_of_its_full_blocks_with_its_salt_and_adapter(salt: str | None, lora: str) -> None:
    found = prompt_of(completion(list(range(11)), cache_salt=salt), Hashing(4), lora)
    expected = sequence_hashes(list(range(11)), 4, cache_salt=salt, lora_name=lora)
    assert found == EncodedPrompt(pack_tokens(range(11)), 11, Hashing(4), pack_u64(expected))
    assert len(expected) == 2


@pytest.mark.parametrize("scheme", HASH_SCHEMES)
@pytest.mark.parametrize("salt", [None, "tenant-1"])
def test_the_hashes_of_every_scheme_are_the_protocols(scheme: str, salt: str | None) -> None:
    hashing, ids = Hashing(16, scheme), list(range(2**32 - 100, 2**32))
    expected = sequence_hashes(ids, 16, cache_salt=salt, is_eagle=hashing.is_eagle)
    assert prompt_of(completion(ids, cache_salt=salt), hashing).sequence_hashes == pack_u64(expected)
    assert len(expected) == 6


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (chat(messages=[]), "messages"),
        (chat(messages=[{"role": "boss", "content": "x"}]), "messages[0].role"),
        (chat(messages=[1]), "messages[0]"),
        (chat(tools=[7]), "tools[0]"),
        (chat(documents="d"), "documents"),
        (chat(chat_template_kwargs=[]), "chat_template_kwargs"),
        (chat(add_special_tokens=True), "add_special_tokens"),
        (completion(""), "prompt"),
        (completion([]), "prompt"),
        (completion([""]), "prompt[0]"),
        (completion([[1, -1]]), "prompt[0][1]"),
        (completion([["a"]]), "prompt[0][0]"),
        (completion([{"a": 1}]), "prompt[0]"),
        (completion([1, 2**32]), "prompt[1]"),
        (completion({"a": 1}), "prompt"),
    ],
)
def test_of_a_prompt_that_is_not_rendered_the_field_is_named_and_its_text_is_hashed(
    asked: ReadBody, field: str
) -> None:
    found = prompt_of(asked)
    text = b"".join(asked[1].prompt_parts)
    assert (found.unrendered, found.ids, found.hashing.scheme) == (field, b"", TEXT_SCHEME)
    assert found.token_count == max(1, len(text) // 4)
    assert len(found.sequence_hashes) == 8 * (len(text) // 4 // found.hashing.block_size)


@pytest.mark.parametrize("options", [{}, {"tools": [{"a": "ü"}]}, {"add_generation_prompt": False}])
@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": ""},
        {"role": "developer", "content": "é😀"},
        {"content": "x", "role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "user", "content": "x", "name": "n"},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ],
)
def test_a_chat_of_every_kind_of_message_has_the_texts_own_tokens(
    message: dict[str, Any], options: dict[str, Any]
) -> None:
    said = [*HELLO, message, *HELLO]
    assert ids_of(chat(messages=said, **options)) == chat_ids(TEXT, said, **options)


def test_texts_with_the_same_beginning_have_hashes_with_the_same_beginning_if_salt_and_adapter_are_the_same() -> None:
    def hashes(end: str, **fields: Any) -> bytes:
        said = [{"role": "boss", "content": "x" * 100}, {"role": "boss", "content": end}]
        return prompt_of(chat(messages=said, **fields), Hashing(4)).sequence_hashes

    one, other = hashes("a" * 100), hashes("b" * 100)
    shared = next(at for at in range(0, len(one), 8) if one[at : at + 8] != other[at : at + 8])
    assert 6 * 8 < shared < len(one)
    assert hashes("a")[:8] != hashes("a", cache_salt="tenant")[:8]


@pytest.mark.parametrize("given", [[], [1, -1]])
def test_token_data_that_is_none_is_refused(given: list[int]) -> None:
    with pytest.raises(RequestInvalid, match=r"^nvext\.token_data"):
        prompt_of(chat(nvext={"token_data": given}))


@pytest.mark.parametrize("prompts", [["hello", "you"], [list(b"hello"), list(b"you")]])
def test_of_several_prompts_the_first_is_hashed_and_all_are_counted(prompts: list[Any]) -> None:
    found = prompt_of(completion(prompts), Hashing(4))
    assert (found.ids, found.token_count, found.unrendered) == (b"", 8, "")
    assert found.sequence_hashes == prompt_of(completion(prompts[0]), Hashing(4)).sequence_hashes


def test_what_is_not_rendered_is_counted_by_its_key() -> None:
    prompts = ModelPrompts(TEXT)
    for asked in (chat(messages=[1]), chat(chat_template="x"), chat(), completion("")):
        prompts.prompt(*asked, Hashing(4))
    counted = {key: count for key, count in prompts.unrendered.items() if count}
    assert counted == {"messages": 1, "chat_template": 1, "prompt": 1}


def test_without_a_tokenizer_texts_are_routed_by_their_text_and_ids_as_ever() -> None:
    with capture_logs() as told:
        prompts = ModelPrompts(UnreadText("/models/m"))
    ids = list(b"hello you")
    made = [prompts.prompt(*asked, Hashing(4)) for asked in (completion("hello you"), chat(), completion(ids))]
    assert [(each.unrendered, each.hashing.scheme) for each in made if isinstance(each, EncodedPrompt)] == [
        ("tokenizer", TEXT_SCHEME), ("tokenizer", TEXT_SCHEME), ("", Hashing(4).scheme),
    ]  # fmt: skip
    assert prompts.unrendered["tokenizer"] == 2
    assert prompts.encoder_name == "none"
    assert told == [{"event": "tokenizer_unread", "directory": "/models/m", "log_level": "warning"}]


# ---------------------------------------------------------------- off the loop

LONG = "x" * 1000


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> ModelPrompts:
    monkeypatch.setitem(OFF_LOOP_BYTES, "byte", 100)
    monkeypatch.setattr("router.prompt.prompts.WAITING_BYTES_MAX", 1500)
    return ModelPrompts(TEXT)


@pytest.mark.parametrize("asked", [completion(LONG), chat(messages=[{"role": "user", "content": LONG}])])
async def test_long_text_is_encoded_by_a_thread_to_the_same_prompt(
    bounded: ModelPrompts, monkeypatch: pytest.MonkeyPatch, asked: ReadBody
) -> None:
    monkeypatch.undo()
    made = bounded.prompt(*asked, Hashing(4))
    assert isinstance(made, asyncio.Future)
    assert await made == prompt_of(asked)


async def test_a_chat_of_many_messages_is_rendered_by_a_thread() -> None:
    asked = chat(messages=HELLO * 300)
    made = ModelPrompts(TEXT).prompt(*asked, Hashing(4))
    assert not isinstance(made, EncodedPrompt)
    made.cancel()


async def test_when_too_much_waits_more_is_refused_until_it_is_cancelled(bounded: ModelPrompts) -> None:
    prompts, is_free = bounded, threading.Event()
    prompts.pool.submit(is_free.wait, 0)
    waits = prompts.prompt(*completion(LONG), Hashing(4))
    with pytest.raises(EncodersBusy, match=r"2056 bytes of prompts wait to be encoded, allowed 1500"):
        prompts.prompt(*completion(LONG), Hashing(4))
    assert isinstance(waits, asyncio.Future)
    waits.cancel()
    await asyncio.sleep(0)
    later = prompts.prompt(*completion(LONG), Hashing(4))
    assert isinstance(later, asyncio.Future)
    pool = prompts.pool
    assert (pool.refused, pool.cancelled, pool.waiting_bytes) == (1, 1, 1028)
    later.cancel()
    is_free.set()


async def test_cancelled_work_is_never_begun_and_no_text_waits_for_a_large_one() -> None:
    pool, is_free, begun = EncodingPool(1, 1 << 20, large_bytes=100), threading.Event(), list[str]()
    large = pool.submit(is_free.wait, 101)
    cancelled = pool.submit(partial(begun.append, "cancelled"), 101)
    await pool.submit(partial(begun.append, "small"), 100)
    cancelled.cancel()
    await asyncio.sleep(0)
    is_free.set()
    await large
    await pool.submit(partial(begun.append, "large"), 101)
    assert begun == ["small", "large"]


async def test_large_texts_leave_a_quarter_of_the_waiting_bytes_to_others() -> None:
    pool = EncodingPool(1, 400, large_bytes=100)
    pool.submit(int, 200)
    with pytest.raises(EncodersBusy, match="301 bytes of prompts wait to be encoded, allowed 300"):
        pool.submit(int, 101)
    pool.submit(int, 100)
    pool.submit(int, 100)
    assert pool.waiting_bytes == 400


# ---------------------------------------------------------------- to the worker

BODIES = [
    b'{"model":"m","prompt":"x"}',
    b' \n\t{ "model" : "m",\r\n "prompt":"{\\"}"}  \n',
    '{"prompt":"äöü{ 模型","model":"m"}'.encode(),
    b'{"prompt":[1,2],"model":"m","temperature":0.10,"seed":1234567890123456789}',
    b'{"model":"m","prompt":"x","kv_prompt_ids":null}',
]


@pytest.mark.parametrize("body", BODIES)
def test_all_other_bytes_stay_as_they_were(body: bytes) -> None:
    sent = b"".join(with_prompt_ids(body, pack_tokens([1, 2, 2**32 - 1])))
    inserted = b'"kv_prompt_ids":"AQAAAAIAAAD/////",'
    assert sent == b"{" + inserted + body.split(b"{", 1)[1]
    assert decode_completion(body) == decode_completion(sent.replace(inserted, b""))


@given(st.text(max_size=60), st.none() | st.text(max_size=5), st.sampled_from([1, 4, 16]), st.booleans())
def test_router_and_worker_agree_on_every_id_and_hash(
    content: str, salt: str | None, block_size: int, sent_on: bool
) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "cache_salt": salt}).encode()
    prompt = prompt_of(read(CHAT, body), Hashing(block_size))
    sent = b"".join(with_prompt_ids(body, prompt.ids)) if sent_on else body
    received = decode_chat(sent)
    ids = as_worker(received)
    assert ids == unpack_tokens(prompt.ids)
    assert pack_u64(sequence_hashes(ids, block_size, cache_salt=received.salt)) == prompt.sequence_hashes
