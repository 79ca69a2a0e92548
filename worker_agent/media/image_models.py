"""A model's image placeholder in chats, its image token, and the check of a prompt's image tokens.

    image token     the settings, else the first of the model's `image_token_id`, `image_token_index` (LLaVA),
                    `media_placeholder_token_id` (Kimi)
    placeholder     the settings, else by `model_type`, else the token's own text
    both known      the model takes images; the placeholder has the image token once, and may have others around it
    none known      it takes none
    one known       refused: images could not be counted

The number of an image's tokens, for routers (`kv_protocol/images.py`): the settings' number, else, for Qwen's models,
by the numbers of `preprocessor_config.json`; else it is unknown, and routers read a prompt only up to its first image.

Models without a standalone encoder (`NO_STANDALONE_ENCODER`) have no encode workers.

Source: keys of `config.json` and `preprocessor_config.json`: the models' classes in huggingface/transformers
(Qwen3-VL's has `size` with the two bounds in pixels as its edges). Placeholders: NVIDIA/TensorRT-LLM,
`placeholder_map` in `tensorrt_llm/_torch/models/modeling_{qwen2vl,qwen3vl,llava_next,llama}.py`. Llama 4:
`docs/SOURCES.md` D4.3.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kv_protocol.images import FixedTokens, ImageRule, QwenTokens
from worker_agent.media.refusals import MediaRefused

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
    """A model that takes images: `placeholder` marks one in its chats, and has `image_token_id` once."""

    placeholder: str
    image_token_id: int


class ImageFactsInvalid(Exception):
    """The model's image settings are inconsistent; the message names what is missing or differs."""


def model_type(config: Mapping[str, Any]) -> str:
    """Return the `model_type` of the model's `config.json`; empty if it has none."""
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def image_facts(
    config: Mapping[str, Any],
    *,
    placeholder: str,
    token_id: int | None,
    text_of: Callable[[int], str],
    encode: Callable[[str], list[int]],
) -> ImageFacts | None:
    """Return a model's image token and placeholder by its `config.json` and the settings; None if it takes no images.

    `text_of` gives a special token's text, empty if it is not one; `encode` a text's tokens, without any around it.

    Raises:
        ImageFactsInvalid: they do not fit together.
    """
    found = [config[key] for key in TOKEN_KEYS if type(config.get(key)) is int]
    token = token_id if token_id is not None else next(iter(found), None)
    if token is None:
        if placeholder:
            raise ImageFactsInvalid(f"image token: found none for {placeholder!r}, allowed one of the tokenizer's")
        return None
    text = placeholder or PLACEHOLDERS.get(model_type(config), "") or text_of(token)
    count = encode(text).count(token) if text else 0
    if count != 1:
        found_text = f"{text!r}, which has {count} tokens {token}" if text else f"none for token {token}"
        raise ImageFactsInvalid(f"placeholder: found {found_text}, allowed a text that has the image token once")
    return ImageFacts(placeholder=text, image_token_id=token)


def image_rule(
    facts: ImageFacts,
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    *,
    tokens_per_image: int | None,
    cached_token_id: int | None,
) -> ImageRule | None:
    """Return the image rule for routers; None if the number of an image's tokens is unknown.

    Raises:
        LimitExceeded: a number is out of its range.
    """
    tokens = FixedTokens(tokens_per_image) if tokens_per_image is not None else _qwen_tokens(config, processor)
    if tokens is None:
        return None
    return ImageRule(
        placeholder=facts.placeholder,
        image_token_id=facts.image_token_id,
        tokens=tokens,
        cached_token_id=cached_token_id,
    )


def check_placeholders(prompt: Sequence[int], image_token_id: int, items: int, field: str) -> None:
    """Raise `MediaRefused` unless the prompt, not yet expanded, has one image token for each item.

    Additional ones come from the client's text, and would get other items' features.
    """
    found = prompt.count(image_token_id)
    if found != items:
        raise MediaRefused("placeholder", field, f"{found} image tokens in the prompt", f"{items}, one an image")


def _qwen_tokens(config: Mapping[str, Any], processor: Mapping[str, Any]) -> QwenTokens | None:
    size = processor.get("size")
    edges = size if isinstance(size, Mapping) else {}
    found = {
        "patch_size": processor.get("patch_size"),
        "merge_size": processor.get("merge_size"),
        "min_pixels": processor.get("min_pixels", edges.get("shortest_edge")),
        "max_pixels": processor.get("max_pixels", edges.get("longest_edge")),
    }
    if model_type(config) not in _QWEN_TYPES or any(type(value) is not int for value in found.values()):
        return None
    return QwenTokens(**found)
