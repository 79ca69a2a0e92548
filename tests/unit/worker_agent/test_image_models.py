"""What a model calls an image: by its own configuration, by the settings, and never by a guess."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_protocol.images import FixedTokens, ImageRule
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.loading import load_text
from tests.support.image_model import PLACEHOLDER, write_image_model
from worker_agent.media.config import ImageModelSection
from worker_agent.media.image_models import ImageFacts, ImageFactsInvalid, image_facts, image_rule, model_type
from worker_agent.media.models import load_image_facts, load_image_rule, model_config

TEXTS = {5: "<image>", 7: "<|image_pad|>"}
SPELLED = {
    "<image>": [5],
    "<|image_pad|>": [7],
    "<|vision_start|><|image_pad|><|vision_end|>": [6, 7, 8],
    "<image><image>": [5, 5],
}


def facts(config: dict[str, Any], placeholder: str = "", token_id: int | None = None) -> ImageFacts | None:
    return image_facts(
        config,
        placeholder=placeholder,
        token_id=token_id,
        text_of=lambda token: TEXTS.get(token, ""),
        encode=lambda text: SPELLED.get(text, [1, 2]),
    )


@pytest.mark.parametrize("key", ["image_token_id", "image_token_index", "media_placeholder_token_id"])
def test_the_model_s_own_token_stands_for_itself(key: str) -> None:
    assert facts({key: 5}) == ImageFacts(placeholder="<image>", image_token_id=5)


def test_a_known_type_has_marks_around_it() -> None:
    found = facts({"model_type": "qwen2_5_vl", "image_token_id": 7})
    assert found == ImageFacts(placeholder="<|vision_start|><|image_pad|><|vision_end|>", image_token_id=7)


def test_settings_go_first() -> None:
    assert facts({"image_token_id": 7}, "<image>", 5) == ImageFacts(placeholder="<image>", image_token_id=5)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"image_token_id": None}, {"image_token_id": True}])
def test_a_model_that_says_nothing_takes_no_images(config: dict[str, Any]) -> None:
    assert facts(config) is None


@pytest.mark.parametrize(
    ("config", "placeholder", "said"),
    [
        ({}, "<image>", "image token: found none for '<image>'"),
        ({"image_token_id": 9}, "", "found none for token 9"),
        ({"image_token_id": 5}, "<image><image>", "which has 2 tokens 5"),
        ({"image_token_id": 5}, "[image]", "which has 0 tokens 5"),
    ],
)
def test_what_does_not_fit_together_is_refused(config: dict[str, Any], placeholder: str, said: str) -> None:
    with pytest.raises(ImageFactsInvalid, match=said.replace("[", r"\[")):
        facts(config, placeholder)


def test_a_directory_says_it(tmp_path: Path) -> None:
    path, token = write_image_model(tmp_path)
    text = load_text(path)
    assert load_image_facts(path, text, ImageModelSection()) == ImageFacts(
        placeholder=PLACEHOLDER, image_token_id=token
    )
    assert model_type(model_config(path)) == "llava_next"
    with pytest.raises(TextError, match="placeholder: found"):
        load_image_facts(path, text, ImageModelSection(placeholder="[image]"))


@pytest.mark.parametrize("content", ["[]", "{", "\ud800"])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(TextError, match=r"config\.json"):
        model_config(str(tmp_path))


def test_a_model_without_a_configuration_takes_no_images() -> None:
    assert load_image_facts("byte", load_text("byte"), ImageModelSection()) is None
    assert json.dumps(model_config("byte")) == "{}"


QWEN = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056}
QWEN3 = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
FACTS = ImageFacts(placeholder="<image>", image_token_id=5)


def rule(model: str, processor: dict[str, Any], tokens_per_image: int | None = None) -> ImageRule | None:
    config = {"model_type": model}
    return image_rule(FACTS, config, processor, tokens_per_image=tokens_per_image, cached_token_id=9)


def test_routers_are_told_how_many_tokens_an_image_has() -> None:
    told = [rule("qwen2_5_vl", QWEN), rule("qwen3_vl", QWEN3), rule("llava_next", {}, 576)]
    assert [each and each.tokens.count(1000, 600) for each in told] == [36 * 21, 31 * 19, 576]
    assert all(
        each and (each.placeholder, each.image_token_id, each.cached_token_id) == ("<image>", 5, 9) for each in told
    )


@pytest.mark.parametrize(
    ("model", "processor"),
    [("llava_next", QWEN), ("qwen2_vl", {}), ("qwen2_vl", QWEN | {"patch_size": None}), ("qwen3_vl", {"size": 1})],
)
def test_where_they_cannot_be_counted_routers_are_told_nothing(model: str, processor: dict[str, Any]) -> None:
    assert rule(model, processor) is None


def test_a_directory_s_rule_is_read_and_bounded(tmp_path: Path) -> None:
    path, token = write_image_model(tmp_path)
    facts = load_image_facts(path, load_text(path), ImageModelSection())
    told = load_image_rule(path, facts, ImageModelSection(tokens_per_image=8))
    assert told == ImageRule(placeholder=PLACEHOLDER, image_token_id=token, tokens=FixedTokens(8))
    assert load_image_rule(path, facts, ImageModelSection()) is None
    assert load_image_rule(path, None, ImageModelSection(tokens_per_image=8)) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN | {"merge_size": 99}))
    with pytest.raises(TextError, match=r"merge_size: found 99"):
        load_image_rule(path, facts, ImageModelSection())
