"""The rule for images in a model's prompts, by which a router computes the same prompt as its workers.

    the template writes      `placeholder`; among its tokens is one `image_token_id`
    the prompt has there     n tokens of the image; block hashes and KV events have `cached_token_id` for each
    n is                     fixed      `tokens`, whatever the image
                             qwen2_vl   from the image's size in pixels, by the formula below

    f = patch_size * merge_size      rows, columns = round(height / f), round(width / f)
    f^2 * rows * columns > max_pixels      b = sqrt(height * width / max_pixels):   max(1, floor(side / b / f)) each
    f^2 * rows * columns < min_pixels      b = sqrt(min_pixels / (height * width)): ceil(side * b / f) each
    n = rows * columns;  an image whose sides differ by more than 200 times is refused by the processor

Source: huggingface/transformers, `models/qwen2_vl/image_processing_qwen2_vl.py` (smart_resize) and
`processing_qwen2_vl.py` (tokens = patches / merge_size^2); Qwen2.5-VL and Qwen3-VL count alike, with other numbers. The
id: TensorRT-LLM, `_torch/models/modeling_qwen2vl.py`, which computes on `vocab_size + 1` in place of the tokenizer's
image token; vLLM keeps the tokenizer's.
"""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import TokenId

IMAGE_TOKENS_MAX = 1 << 16
"""The most tokens of one image, so that a few bytes of a request cannot expand to any number of them."""
_RATIO_MAX = 200


class FixedTokens(msgspec.Struct, frozen=True, tag="fixed"):
    """Every image has `tokens` tokens."""

    tokens: Annotated[int, Meta(ge=1, le=IMAGE_TOKENS_MAX)]

    def count(self, width: int, height: int) -> int | None:  # noqa: ARG002 - whatever its size
        """Return how many tokens an image has."""
        return self.tokens


class QwenTokens(msgspec.Struct, frozen=True, tag="qwen2_vl", kw_only=True):
    """The more pixels, the more tokens: `patch_size` in pixels, `merge_size` in patches, bounds in pixels."""

    patch_size: Annotated[int, Meta(ge=1, le=256)] = 14
    merge_size: Annotated[int, Meta(ge=1, le=16)] = 2
    min_pixels: Annotated[int, Meta(ge=1)]
    max_pixels: int

    def __post_init__(self) -> None:
        least, most = max(self.min_pixels, self.side**2), IMAGE_TOKENS_MAX * self.side**2
        if not least <= self.max_pixels <= most:
            raise LimitExceeded("images.tokens.max_pixels", self.max_pixels, f"{least}..{most}")

    @property
    def side(self) -> int:
        """The side of the square that becomes a token, in pixels."""
        return self.patch_size * self.merge_size

    def count(self, width: int, height: int) -> int | None:
        """Return how many tokens an image of `width` x `height` pixels has; None if the processor refuses it."""
        if max(width, height) > _RATIO_MAX * min(width, height):
            return None
        side = self.side
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side**2
        if pixels > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(each / shrink / side)) for each in (height, width))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(each * grow / side) for each in (height, width))
        return rows * columns


class ImageRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule for images in a model's prompts. Workers of one model must agree on it, as on its tokenizer."""

    placeholder: Annotated[str, Meta(min_length=1, max_length=256)]
    image_token_id: TokenId
    tokens: FixedTokens | QwenTokens
    cached_token_id: TokenId | None = None
    """None: it is `image_token_id`."""


def rule_text(rule: ImageRule | None) -> str:
    """Return the rule on one line, `none` without a rule: equal texts are equal rules."""
    return "none" if rule is None else msgspec.json.encode(rule).decode()
