"""Images and embeddings as tensors: the only module that imports Pillow; `logits.py` also imports torch.

    image          Pillow's, decoded, RGB: what the library's own server hands to its processors
    embeddings     the file's one tensor as torch's; and a file of a torch tensor, which may be on any device
    logit_bias     a torch tensor, f32, one number for each token of the vocabulary

Pillow and torch come with TensorRT-LLM (the extra `trtllm`), and are imported on use. Everything here takes long, or
may copy from a GPU: it belongs on a thread. Bytes were checked before (`media/parts.py`): an image has no more
pixels than is allowed, and a file contains only tensors.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/inputs/utils.py` (images), `tensorrt_llm/serve/openai_protocol.py` (bias).
"""

import io
from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any

from worker_agent.media.safetensors import DTYPE_BYTES, written_tensor
from worker_agent.port.types import Media, RequestRefused

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def image_of(media: Media) -> Any:  # noqa: ANN401 - Pillow's
    """Return the image; raise `RequestRefused` if its bytes begin like an image and cannot be decoded."""
    pillow = import_module("PIL.Image")
    try:
        with pillow.open(io.BytesIO(media.data)) as image:
            if media.pixels is None or prod(image.size) <= prod(media.pixels):
                return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, pillow.DecompressionBombError) as error:
        allowed = "an image that can be decoded"
        raise RequestRefused(media.field, f"{media.media_type} ({type(error).__name__})", allowed) from error
    raise RequestRefused(media.field, "more pixels than the header has", "an image that can be decoded")


def tensor_of(media: Media) -> Any:  # noqa: ANN401 - torch's
    """Return the embeddings' one tensor, on the CPU, in memory of its own."""
    torch, tensor = import_module("torch"), media.tensor
    assert tensor is not None
    data = bytearray(memoryview(media.data)[tensor.begin :])
    flat = torch.frombuffer(data, dtype=getattr(torch, _TORCH_NAMES[tensor.dtype]), count=prod(tensor.shape))
    return flat.reshape(tensor.shape)


def file_of(tensor: Any) -> bytes:  # noqa: ANN401 - torch's
    """Return the `.safetensors` file of a tensor; raise `RequestRefused` for a type that no file has."""
    torch = import_module("torch")
    dtype = next((name for name, theirs in _TORCH_NAMES.items() if tensor.dtype == getattr(torch, theirs)), None)
    if dtype is None:
        raise RequestRefused("embeddings", str(tensor.dtype), ", ".join(DTYPE_BYTES))
    plain = tensor.detach().cpu().contiguous()
    return written_tensor(dtype, tuple(plain.shape), plain.view(torch.uint8).numpy().tobytes())


def bias_of(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> Any:  # noqa: ANN401 - torch's
    """Return the tensor that is added to the logits."""
    torch = import_module("torch")
    bias = torch.zeros(vocab_size, dtype=torch.float32)
    for token, value in logit_bias:
        bias[token] = value
    return bias
