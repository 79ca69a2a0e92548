"""A request's prompt as tokens and sequence hashes: what it would find in a KV cache."""

import base64
from typing import NamedTuple

from indexer.embedded import hash_blocks
from kv_protocol.codec import unpack_u64
from kv_protocol.hashing import Hashing, hash_seed, pack_tokens
from kv_protocol.openai import ChatRequest, Request, RequestInvalid
from kv_runtime.text import Text


class Prompt(NamedTuple):
    """Token ids, and the sequence hashes of their full blocks."""

    ids: list[int]
    hashing: Hashing
    sequence_hashes: tuple[int, ...]


def prompt_of(request: Request, text: Text, hashing: Hashing) -> Prompt:
    """Return the prompt as the workers will see it; raise `RequestInvalid` or `TextError` where there is none."""
    if request.kv_prompt_ids is not None:
        raise RequestInvalid("kv_prompt_ids", "a value", "none: the router sets it")
    if isinstance(request, ChatRequest):
        ids = text.encode_chat(request.messages, tools=request.tools)
    else:
        ids = text.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    if not ids:
        raise RequestInvalid("messages" if isinstance(request, ChatRequest) else "prompt", "0 tokens", "one or more")
    seed = hash_seed(cache_salt=request.cache_salt)
    hashes = hash_blocks(ids, hashing.block_size, seed, is_eagle=hashing.is_eagle)
    return Prompt(ids, hashing, unpack_u64(hashes))


def with_prompt_ids(body: bytes, ids: list[int]) -> bytes:
    """Return the JSON object `body` with `kv_prompt_ids` as its first key, all else byte for byte as it was."""
    opening, _, rest = body.partition(b"{")
    return opening + b'{"kv_prompt_ids":"' + base64.b64encode(pack_tokens(ids)) + b'",' + rest
