"""Encodes a prompt's images with TensorRT-LLM's encoder, to handles or to files with the embeddings."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from worker_agent.engines.trtllm.bindings import Bindings
from worker_agent.media.inputs import with_digests
from worker_agent.port.handoff import Handoff, handoff_of
from worker_agent.port.types import Media, RequestRefused


class LoadedEncoder(NamedTuple):
    """The loaded encoder. The lock `placing` guards the placing of media in prompts: tokenizers are not thread-safe."""

    bindings: Bindings
    llm: Any
    placing: asyncio.Lock


async def handles_of(encoder: LoadedEncoder, text: str, media: Sequence[Media]) -> Handoff:
    """Return the handles, and the images' digests as their hashes.

    Raises:
        RequestRefused: an image cannot be decoded, or there is not a handle for each.
        Exception: whatever the library raises.
    """
    bindings, llm = encoder.bindings, encoder.llm
    async with encoder.placing:
        prepared = await asyncio.to_thread(bindings.to_encode, llm, text, media)
    handoff = handoff_of((await bindings.encode(llm, prepared)).disaggregated_params)
    handles = len(handoff.multimodal_embedding_handles or ())
    if handles != len(media):
        raise RequestRefused("media", f"{handles} embeddings of {len(media)} images", "as many")
    return with_digests(handoff, [each.digest for each in media])


async def files_of(encoder: LoadedEncoder, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:
    """Return a `.safetensors` file for each image, in their order; otherwise as `handles_of`."""
    handoff = await handles_of(encoder, text, media)
    handles = handoff.multimodal_embedding_handles or ()
    return tuple([await asyncio.to_thread(encoder.bindings.embeddings, handle) for handle in handles])
