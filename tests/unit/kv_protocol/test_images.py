"""What an image becomes: the formula, the bounds, the wire."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import WorkerRegistered, decode_fleet_event
from kv_protocol.images import IMAGE_TOKENS_MAX, FixedTokens, QwenTokens, rule_text
from tests.unit.kv_protocol.test_fleet import LEAST, wire

FIXED: dict[str, Any] = {
    "placeholder": "<image>",
    "image_token_id": 32_000,
    "tokens": {"type": "fixed", "tokens": 576},
    "cached_token_id": None,
}
QWEN: dict[str, Any] = {
    "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    "image_token_id": 151_655,
    "tokens": {"type": "qwen2_vl", "patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056},
    "cached_token_id": 152_065,
}


def upstream(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size in pixels to which an image is resized, in the order of the published formula."""
    h_bar, w_bar = round(height / factor) * factor, round(width / factor) * factor
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


sides = st.integers(1, 1 << 14)


@given(sides, sides, st.integers(1, 40), st.integers(1, 4), st.integers(1, 3000), st.integers(1, 3000))
def test_the_count_is_that_of_the_published_formula(
    width: int, height: int, patch: int, merge: int, one: int, other: int
) -> None:
    side = patch * merge
    rule = QwenTokens(
        patch_size=patch, merge_size=merge, min_pixels=min(one, other) * side**2, max_pixels=max(one, other) * side**2
    )
    if max(width, height) > 200 * min(width, height):
        assert rule.count(width, height) is None
    else:
        h_bar, w_bar = upstream(height, width, side, rule.min_pixels, rule.max_pixels)
        patches = (h_bar // patch) * (w_bar // patch)
        assert rule.count(width, height) == patches // merge**2


def test_a_fixed_count_does_not_look_at_the_image() -> None:
    assert {FixedTokens(576).count(1, 1), FixedTokens(576).count(9000, 20)} == {576}


def test_a_worker_that_says_nothing_of_images_has_no_rule() -> None:
    assert WorkerRegistered(**LEAST).images is None
    assert rule_text(None) == "none"


def changed(**fields: Any) -> dict[str, Any]:
    return FIXED | fields


def counted(**fields: Any) -> dict[str, Any]:
    return QWEN | {"tokens": QWEN["tokens"] | fields}


def test_a_rule_that_cannot_be_is_refused_with_its_field() -> None:
    for images, message in (
        (changed(placeholder=""), "length >= 1 - at `$.images.placeholder`"),
        (changed(placeholder="x" * 257), "length <= 256 - at `$.images.placeholder`"),
        (changed(image_token_id=-1), "`int` >= 0 - at `$.images.image_token_id`"),
        (changed(cached_token_id=2**32), "`int` <= 4294967295 - at `$.images.cached_token_id`"),
        (changed(tokens={"type": "fixed", "tokens": 0}), "`int` >= 1 - at `$.images.tokens.tokens`"),
        (changed(tokens={"type": "fixed", "tokens": 65537}), "`int` <= 65536 - at `$.images.tokens.tokens`"),
        (counted(patch_size=0), "`int` >= 1 - at `$.images.tokens.patch_size`"),
        (counted(merge_size=17), "`int` <= 16 - at `$.images.tokens.merge_size`"),
        (counted(min_pixels=0), "`int` >= 1 - at `$.images.tokens.min_pixels`"),
        (counted(min_pixels=12_845_057), "images.tokens.max_pixels: found 12845056, allowed 12845057..51380224"),
        (counted(max_pixels=783), "images.tokens.max_pixels: found 783, allowed 3136..51380224"),
        (counted(max_pixels=51_380_225), "images.tokens.max_pixels: found 51380225, allowed 3136..51380224"),
        (changed(tokens={"type": "guess"}), "Invalid value 'guess' - at `$.images.tokens.type`"),
        (changed(image_token_id="9"), "Expected `int`, got `str` - at `$.images.image_token_id`"),
        ({"placeholder": "x"}, "Object missing required field `image_token_id` - at `$.images`"),
    ):
        with pytest.raises(MalformedMessage) as refused:
            decode_fleet_event(wire(LEAST | {"images": images}))
        assert message in str(refused.value)


def test_no_rule_makes_more_of_an_image_than_it_may() -> None:
    largest = QwenTokens(min_pixels=1, max_pixels=IMAGE_TOKENS_MAX * 784)
    assert largest.count(1 << 20, 1 << 20) == IMAGE_TOKENS_MAX
