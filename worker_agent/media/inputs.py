"""Media of a request as TensorRT-LLM takes them, and the keys that distinguish their blocks from other media's.

    media         beside the prompt                                  keyed in the cache, and in events, by
    images        `multi_modal_data` {"image": [image, ..]}          `multi_modal_uuids`: our digests; and the pixels
    embeddings    `multi_modal_embeddings` {"image": [tensor, ..]}   nothing: so the cache salt names them
    handles       `disaggregated_params`, an encode worker's         `multimodal_hashes`: our digests, 8 ints each

The prompt is text, as the library's own server gives it: most models' processors place media in text and tokenize it
themselves (`add_special_tokens` false: the chat's template wrote the special tokens). Without text the prompt is token
ids, which these processors turn into text again; an encoder's handles cannot be placed then.

Embeddings have no hash of their own: two prompts with different ones have the same tokens in the cache, and the second
would reuse the first one's blocks. The salt distinguishes them; it includes the client's salt.

An encoder's own hashes are of pixels, so only it can compute them. They are replaced by the digests of the images'
bytes: so the same prompt has the same blocks, whichever worker encoded its images.

Source: NVIDIA/TensorRT-LLM main, mid-2026: `tensorrt_llm/llmapi/llm.py`, `_preprocess`; `tensorrt_llm/inputs/data.py`
(`multi_modal_uuids`); `tensorrt_llm/inputs/multimodal.py`, `apply_mm_hashes`, `hexdigest_to_int32` (eight signed ints,
each of eight digits, the first the highest).
"""

import struct
from collections.abc import Iterator, Sequence

import msgspec
from blake3 import blake3

from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineRequest, Rule

_WORDS = ">8i"


def has_handles(handoff: Handoff | None) -> bool:
    """Return whether the handoff has an encode worker's media."""
    return handoff is not None and handoff.multimodal_embedding_handles is not None


def has_media(request: EngineRequest) -> bool:
    """Return whether the engine places media in the prompt, and so computes other tokens than the request states."""
    return bool(request.media) or has_handles(request.handoff)


def media_rules(request: EngineRequest, *, takes_transfer: bool) -> Iterator[Rule]:
    """Yield the rules for a request's media."""
    count = len(request.media)
    handles = has_handles(request.handoff) and not takes_transfer
    allowed = "none beside an encode worker's handles"
    yield "media", f"{count} items", allowed, not (count and handles)
    allowed = "none: the prefill worker has computed the prompt with them"
    yield "media", f"{count} items", allowed, not (count and takes_transfer)
    allowed = "the prompt as text, beside an encode worker's handles"
    yield "text", request.text, allowed, bool(request.text) or not handles


def cache_salt_of(request: EngineRequest) -> str | None:
    """Return the salt of the request's blocks, made of the client's salt and its embeddings; None if it has neither."""
    embeddings = [each for each in request.media if each.tensor is not None]
    if not embeddings:
        return request.cache_salt or None
    hasher = blake3()
    for part in (request.cache_salt or "", *(each.digest for each in embeddings)):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return f"media-{hasher.hexdigest()}"


def with_digests(handoff: Handoff, digests: Sequence[str]) -> Handoff:
    """Return the encoder's handoff, its media named by `digests`, one for each handle in their order."""
    assert len(handoff.multimodal_embedding_handles or ()) == len(digests)
    return msgspec.structs.replace(handoff, multimodal_hashes=tuple(map(digest_words, digests)))


def digest_words(digest: str) -> tuple[int, ...]:
    """Return 64 hex digits as the engine's eight signed ints."""
    return struct.unpack(_WORDS, bytes.fromhex(digest))
