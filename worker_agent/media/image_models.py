"""A model's image placeholder in chats, its image token, and how many tokens an image has.

A model's facts are in `config.json` and `preprocessor_config.json` of its directory.

    image token     the settings, else the first of the model's `image_token_id`, `image_token_index` (LLaVA),
                    `media_placeholder_token_id` (Kimi)
    placeholder     the settings, else by `model_type`, else the token's own text
    both known      the model takes images; the placeholder has the image token once, and may have others around it
    none known      it takes no images
    one known       refused: images could not be counted

The number of an image's tokens, for routers (`kv_protocol/images.py`): the settings' number, else, for Qwen's models,
by the numbers of `preprocessor_config.json`; else it is unknown, and routers read a prompt only up to its first image.

Models without a standalone encoder (`NO_STANDALONE_ENCODER`) have no encode workers.

Source: keys of `config.json` and `preprocessor_config.json`: the models' classes in huggingface/transformers
(Qwen3-VL's has `size` with the two bounds in pixels as its edges). Placeholders: NVIDIA/TensorRT-LLM,
`placeholder_map` in `tensorrt_llm/_torch/models/modeling_{qwen2vl,qwen3vl,llava_next,llama}.py`. Llama 4:
`docs/SOURCES.md` D4.3.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_protocol.images import FixedTokens, ImageRule, QwenTokens
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.chat_template import json_object
from kv_runtime.text.model import Text
from worker_agent.media.config import ImageModelSection

NO_STANDALONE_ENCODER = frozenset({"llama4"})
TOKEN_KEYS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PLACEHOLDERS: Mapping[str, str] = {
    **dict.fromkeys(_QWEN_TYPES, _QWEN),
    "llava_next": "<image>",
    "llama4": "<|image|>",
}


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model that takes images: `placeholder` marks an image in its chats, and has `image_token_id` once."""

    placeholder: str
    image_token_id: int


def model_type(config: Mapping[str, Any]) -> str:
    """Return the `model_type` of the model's `config.json`; empty if it has none."""
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def model_config(model_path: str, name: str = "config.json") -> Mapping[str, Any]:
    """Return a file of the model's directory; empty if it is missing, as for the built-in model.

    Raises:
        TextError: it cannot be read, or is no JSON object.
    """
    return json_object(Path(model_path) / name)


def image_facts(model_path: str, text: Text, section: ImageModelSection) -> ImageFacts | None:
    """Return the image token and placeholder of the chats of a model's directory; None if it takes no images.

    Raises:
        TextError: they are unknown, or do not fit each other or the model's tokenizer.
    """
    config = model_config(model_path)
    found = [config[key] for key in TOKEN_KEYS if type(config.get(key)) is int]
    token = section.token_id if section.token_id is not None else next(iter(found), None)
    if token is None:
        if section.placeholder:
            raise _misfit(
                model_path, f"image token: found none for {section.placeholder!r}, allowed one of the tokenizer's"
            )
        return None
    own = next((special for special, number in text.special_ids.items() if number == token), "")
    placeholder = section.placeholder or PLACEHOLDERS.get(model_type(config), own)
    count = text.encode(placeholder, add_special_tokens=False).count(token) if placeholder else 0
    if count != 1:
        shown = f"{placeholder!r}, which has {count} tokens {token}" if placeholder else f"none for token {token}"
        raise _misfit(model_path, f"placeholder: found {shown}, allowed a text that has the image token once")
    return ImageFacts(placeholder=placeholder, image_token_id=token)


def image_rule(model_path: str, facts: ImageFacts | None, section: ImageModelSection) -> ImageRule | None:
    """Return the image rule for routers; None if the model takes no images, or their tokens cannot be counted.

    Raises:
        TextError: a number is out of its range.
    """
    if facts is None:
        return None
    tokens = _qwen_tokens(model_path) if section.tokens_per_image is None else FixedTokens(section.tokens_per_image)
    if tokens is None:
        return None
    return ImageRule(
        placeholder=facts.placeholder,
        image_token_id=facts.image_token_id,
        tokens=tokens,
        cached_token_id=section.cached_token_id,
    )


def _qwen_tokens(model_path: str) -> QwenTokens | None:
    processor = model_config(model_path, "preprocessor_config.json")
    size = processor.get("size")
    edges = size if isinstance(size, Mapping) else {}
    found = {
        "patch_size": processor.get("patch_size"),
        "merge_size": processor.get("merge_size"),
        "min_pixels": processor.get("min_pixels", edges.get("shortest_edge")),
        "max_pixels": processor.get("max_pixels", edges.get("longest_edge")),
    }
    if model_type(model_config(model_path)) not in _QWEN_TYPES or any(type(each) is not int for each in found.values()):
        return None
    try:
        return msgspec.convert(found, QwenTokens)
    except UNDECODABLE as error:
        raise TextError(
            f"{model_path}: preprocessor_config.json", str(error), "sizes that an image may have"
        ) from error


def _misfit(model_path: str, problem: str) -> TextError:
    return TextError(model_path, problem, "images.placeholder and images.token_id that fit the model")
