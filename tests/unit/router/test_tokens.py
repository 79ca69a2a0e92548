"""Prompts as tokens: the same ids and hashes as the worker's, and the client's bytes otherwise as they were."""

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import native
from kv_protocol import openai
from kv_protocol.hashing import (
    EAGLE_HASH_SCHEME,
    HASH_SCHEMES,
    Hashing,
    chain,
    local_block_hashes,
    sequence_hashes,
    unpack_tokens,
)
from kv_protocol.openai import ChatRequest, Request, RequestInvalid
from kv_runtime.text import ByteText, TextError
from router.tokens import Prompt, prompt_of, with_prompt_ids
from worker_agent.core.request_rules import prompt_ids

TEXT = ByteText()
HELLO = [{"role": "user", "content": "hello, worker"}]


def chat(**fields: Any) -> Request:
    return openai.decode_chat(json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def completion(prompt: Any, **fields: Any) -> Request:
    return openai.decode_completion(json.dumps({"model": "m", "prompt": prompt} | fields).encode())


def as_worker(request: Request) -> list[int]:
    """Return the ids that an agent computes on: those it is sent, else its own."""
    if request.kv_prompt_ids is not None:
        return prompt_ids(request.kv_prompt_ids)
    if isinstance(request, ChatRequest):
        return TEXT.encode_chat(request.messages, tools=request.tools)
    return TEXT.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt


def test_a_chat_is_encoded_with_its_template_and_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_of(chat(), TEXT, Hashing(4)).ids == TEXT.encode_chat(HELLO)
    assert prompt_of(chat(tools=tools), TEXT, Hashing(4)).ids == TEXT.encode_chat(HELLO, tools=tools)


def test_a_completion_is_its_text_or_its_ids() -> None:
    assert prompt_of(completion("häh"), TEXT, Hashing(4)).ids == list("häh".encode())
    assert prompt_of(completion([5, 0, 2**32 - 1]), TEXT, Hashing(4)).ids == [5, 0, 2**32 - 1]


@pytest.mark.parametrize("salt", [None, "", "tenant-1"])
def test_the_hashes_are_those_of_its_full_blocks_with_its_salt(salt: str | None) -> None:
    found = prompt_of(completion(list(range(11)), cache_salt=salt), TEXT, Hashing(4))
    assert found == Prompt(list(range(11)), Hashing(4), tuple(sequence_hashes(list(range(11)), 4, cache_salt=salt)))
    assert len(found.sequence_hashes) == 2


@pytest.mark.parametrize("scheme", HASH_SCHEMES)
@pytest.mark.parametrize("salt", [None, "tenant-1"])
@pytest.mark.parametrize("is_built", [True, False])
def test_with_the_extension_and_without_the_hashes_are_the_protocols(
    monkeypatch: pytest.MonkeyPatch, scheme: str, salt: str | None, is_built: bool
) -> None:
    if not is_built:
        monkeypatch.setattr(native, "load", lambda: None)
    hashing, ids = Hashing(16, scheme), list(range(2**32 - 100, 2**32))
    expected = sequence_hashes(ids, 16, cache_salt=salt, is_eagle=hashing.is_eagle)
    assert prompt_of(completion(ids, cache_salt=salt), TEXT, hashing) == Prompt(ids, hashing, tuple(expected))
    assert len(expected) == 6


def test_without_xxhash_in_the_extension_the_hashes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(HAS_XXHASH=False))
    found = prompt_of(completion(list(range(11))), TEXT, Hashing(4))
    assert found.sequence_hashes == tuple(sequence_hashes(range(11), 4))


def test_a_salt_keeps_caches_apart() -> None:
    salted, plain = (prompt_of(completion([1, 2, 3, 4], cache_salt=salt), TEXT, Hashing(4)) for salt in ("a", None))
    assert set(salted.sequence_hashes).isdisjoint(plain.sequence_hashes)


def test_prompt_ids_are_the_routers_to_set() -> None:
    with pytest.raises(RequestInvalid, match="kv_prompt_ids"):
        prompt_of(chat(kv_prompt_ids="AAAA"), TEXT, Hashing(4))


def test_what_a_template_refuses_is_named() -> None:
    with pytest.raises(TextError, match=r"messages\[0\]\.role"):
        prompt_of(chat(messages=[{"role": "boss", "content": "x"}]), TEXT, Hashing(4))


# ---------------------------------------------------------------- to the worker

BODIES = [
    b'{"model":"m","prompt":"x"}',
    b' \n\t{ "model" : "m",\r\n "prompt":"{\\"}"}  \n',
    '{"prompt":"äöü{ 模型","model":"m"}'.encode(),
    b'{"prompt":[1,2],"model":"m","temperature":0.10,"seed":123456789012345678901234567890}',
    b'{"model":"m","prompt":"x","kv_prompt_ids":null}',
]


@pytest.mark.parametrize("body", BODIES)
def test_all_other_bytes_stay_as_they_were(body: bytes) -> None:
    sent = with_prompt_ids(body, [1, 2, 2**32 - 1])
    head, tail = body.split(b"{", 1)
    inserted = b'"kv_prompt_ids":"AQAAAAIAAAD/////",'
    assert sent == head + b"{" + inserted + tail
    assert openai.decode_completion(body) == openai.decode_completion(sent.replace(inserted, b""))


@pytest.mark.parametrize("body", BODIES[:-1])
def test_the_worker_reads_the_ids_that_were_sent(body: bytes) -> None:
    received = openai.decode_completion(with_prompt_ids(body, [7, 8, 9]))
    assert as_worker(received) == [7, 8, 9]


def test_a_client_that_says_null_gets_the_same_ids_from_the_worker_itself() -> None:
    received = openai.decode_completion(with_prompt_ids(BODIES[-1], list(b"x")))
    assert as_worker(received) == list(b"x")


@given(st.text(max_size=60), st.none() | st.text(max_size=5), st.sampled_from([1, 4, 16]), st.booleans())
def test_router_and_worker_agree_on_every_id_and_hash(
    content: str, salt: str | None, block_size: int, sent_on: bool
) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "cache_salt": salt}).encode()
    prompt = prompt_of(openai.decode_chat(body), TEXT, Hashing(block_size))
    received = openai.decode_chat(with_prompt_ids(body, prompt.ids) if sent_on else body)
    ids = as_worker(received)
    assert ids == prompt.ids
    assert tuple(sequence_hashes(ids, block_size, cache_salt=received.cache_salt)) == prompt.sequence_hashes


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_ids_are_little_endian_u32_in_base64(ids: list[int]) -> None:
    sent = json.loads(with_prompt_ids(b'{"model":"m"}', ids))
    assert unpack_tokens(base64.b64decode(sent["kv_prompt_ids"], validate=True)) == ids
    assert list(sent) == ["kv_prompt_ids", "model"]


def test_prompts_for_an_engine_that_drafts_are_hashed_in_bigrams() -> None:
    found = prompt_of(completion(list(range(9))), TEXT, Hashing(4, EAGLE_HASH_SCHEME))
    assert found.sequence_hashes == tuple(chain(local_block_hashes(range(9), 4, is_eagle=True)))
    assert len(prompt_of(completion(list(range(8))), TEXT, Hashing(4, EAGLE_HASH_SCHEME)).sequence_hashes) == 1
