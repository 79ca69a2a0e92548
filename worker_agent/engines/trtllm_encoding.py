"""What TensorRT-LLM's encoder makes of a prompt's images: handles, or files of what stands behind them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from worker_agent.core.disaggregated import Handoff, handoff_of
from worker_agent.core.engine import RequestRefused
from worker_agent.core.media import Media
from worker_agent.core.media_inputs import with_digests
from worker_agent.engines.trtllm_library import Library
from worker_agent.engines.trtllm_tensors import image_of


async def handles_of(library: Library, llm: Any, text: str, media: Sequence[Media]) -> Handoff:  # noqa: ANN401
    """Return the handles, and the images' digests as their hashes.

    Raises:
        RequestRefused: an image cannot be decoded, or there is not a handle for each.
        Exception: whatever the library raises.
    """
    images = [await asyncio.to_thread(image_of, each) for each in media]
    handoff = handoff_of((await library.encode(llm, text, images)).disaggregated_params)
    handles = len(handoff.multimodal_embedding_handles or ())
    if handles != len(media):
        raise RequestRefused("media", f"{handles} embeddings of {len(media)} images", "as many")
    return with_digests(handoff, [each.digest for each in media])


async def files_of(library: Library, llm: Any, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:  # noqa: ANN401
    """Return a `.safetensors` file for each image, in their order; otherwise as `handles_of`."""
    handoff = await handles_of(library, llm, text, media)
    handles = handoff.multimodal_embedding_handles or ()
    return tuple([await asyncio.to_thread(library.embeddings, handle) for handle in handles])
