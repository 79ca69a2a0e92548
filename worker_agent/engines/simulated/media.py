"""A simulated encoder: embeddings made of the images' digests.

    handle   shaped as a shared tensor's; `storage_handle` is the image's digest, and nothing can be read through it
    hash     the digest's words
    file     one tensor of 2 rows of 16, whose bytes are the digest's

Source of the shapes: NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py`; `worker_agent/media/inputs.py`.
"""

from collections.abc import Sequence
from typing import Any

from worker_agent.engines.trtllm.tensors import EMBEDDINGS
from worker_agent.media.inputs import digest_words, of_kind
from worker_agent.media.safetensors import written_tensor
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import Media, RequestRefused

IMAGE_S = 0.02
"""Engine seconds for one image; assumed."""
_TOKENS, _WIDTH, _ELEMENT_BYTES = 256, 4096, 2


def encoded(media: Sequence[Media]) -> Handoff:
    """Return a handle and the hash of each of the images, in their order; raise `RequestRefused`."""
    if not media or len(of_kind(media, "image")) < len(media):
        found = [each.kind for each in media]
        raise RequestRefused("media", found, "images, one or more: embeddings are encoded already")
    return Handoff(
        multimodal_embedding_handles=tuple(_handle(each.digest) for each in media),
        multimodal_hashes=tuple(digest_words(each.digest) for each in media),
    )


def embedding_files(media: Sequence[Media]) -> tuple[bytes, ...]:
    """Return a `.safetensors` file for each of the images, in their order; raise `RequestRefused`."""
    digests = [bytes.fromhex(each["storage_handle"]) for each in encoded(media).multimodal_embedding_handles or ()]
    return tuple(written_tensor(EMBEDDINGS, "F16", (2, len(digest) // 2), digest * 2) for digest in digests)


def _handle(digest: str) -> dict[str, Any]:
    return {
        "method_key": 1,
        "tensor_size": [_TOKENS, _WIDTH],
        "tensor_stride": [_WIDTH, 1],
        "tensor_offset": 0,
        "storage_handle": digest,
        "storage_size_bytes": _TOKENS * _WIDTH * _ELEMENT_BYTES,
        "dtype": "torch.float16",
    }
