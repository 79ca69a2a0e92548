"""What a model calls an image: by its own configuration, by the settings, and never by a guess."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kv_protocol.images import FixedTokens, ImageRule
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.loading import load_text
from tests.support.image_model import PLACEHOLDER, write_image_model
from worker_agent.media.config import ImageModelSection
from worker_agent.media.image_models import ImageFacts, image_facts, image_rule, model_config

QWEN_MARKS = "<|vision_start|><|image_pad|><|vision_end|>"
SPELLED = {"<image>": [5], "<|image_pad|>": [7], QWEN_MARKS: [6, 7, 8], "<image><image>": [5, 5]}


class Tokenizer:
    """Two image tokens, and the texts that have them."""

    special_ids: ClassVar = {"<image>": 5, "<|image_pad|>": 7}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return SPELLED.get(text, [1, 2])


def facts(directory: Path, config: object, **settings: Any) -> ImageFacts | None:
    (directory / "config.json").write_text(json.dumps(config))
    text: Any = Tokenizer()
    return image_facts(str(directory), text, ImageModelSection(**settings))


@pytest.mark.parametrize(
    ("config", "settings", "found"),
    [
        ({"image_token_id": 5}, {}, ("<image>", 5)),
        ({"image_token_index": 5}, {}, ("<image>", 5)),
        ({"media_placeholder_token_id": 5}, {}, ("<image>", 5)),
        ({"model_type": "qwen2_5_vl", "image_token_id": 7}, {}, (QWEN_MARKS, 7)),
        ({"image_token_id": 7}, {"placeholder": "<image>", "token_id": 5}, ("<image>", 5)),
        ({}, {}, None),
        ({"model_type": "llama"}, {}, None),
        ({"image_token_id": None}, {}, None),
        ({"image_token_id": True}, {}, None),
    ],
)
def test_the_settings_go_first_then_the_model_s_own_token(
    tmp_path: Path, config: object, settings: Any, found: tuple[str, int] | None
) -> None:
    told = facts(tmp_path, config, **settings)
    assert (told and (told.placeholder, told.image_token_id)) == found


@pytest.mark.parametrize(
    ("config", "placeholder", "said"),
    [
        ({}, "<image>", "image token: found none for '<image>'"),
        ({"image_token_id": 9}, "", "found none for token 9"),
        ({"image_token_id": 5}, "<image><image>", "which has 2 tokens 5"),
        ({"image_token_id": 5}, "[image]", "placeholder: found '[image]', which has 0 tokens 5"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, config: object, placeholder: str, said: str) -> None:
    with pytest.raises(TextError) as refused:
        facts(tmp_path, config, placeholder=placeholder)
    assert said in str(refused.value)


@pytest.mark.parametrize("content", ["[]", "{", "\ud800"])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(TextError, match=r"config\.json"):
        model_config(str(tmp_path))


# ------------------------------------------------------------------------------------------- for routers
QWEN = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056}
QWEN3 = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
FACTS = ImageFacts(placeholder="<image>", image_token_id=5)


@pytest.mark.parametrize(
    ("model", "processor", "tokens_per_image", "count"),
    [
        ("qwen2_5_vl", QWEN, None, 36 * 21),
        ("qwen3_vl", QWEN3, None, 31 * 19),
        ("llava_next", {}, 576, 576),
        ("llava_next", QWEN, None, None),
        ("qwen2_vl", {}, None, None),
        ("qwen2_vl", QWEN | {"patch_size": None}, None, None),
        ("qwen3_vl", {"size": 1}, None, None),
    ],
)
def test_routers_are_told_how_many_tokens_an_image_has_where_that_is_known(
    tmp_path: Path, model: str, processor: object, tokens_per_image: int | None, count: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    told = image_rule(str(tmp_path), FACTS, ImageModelSection(tokens_per_image=tokens_per_image, cached_token_id=9))
    assert (told and told.tokens.count(1000, 600)) == count
    assert told is None or (told.placeholder, told.image_token_id, told.cached_token_id) == ("<image>", 5, 9)


def test_a_directory_s_rule_is_read_and_bounded(tmp_path: Path) -> None:
    path, token = write_image_model(tmp_path)
    found = image_facts(path, load_text(path), ImageModelSection())
    told = image_rule(path, found, ImageModelSection(tokens_per_image=8))
    assert told == ImageRule(placeholder=PLACEHOLDER, image_token_id=token, tokens=FixedTokens(8))
    assert image_rule(path, None, ImageModelSection(tokens_per_image=8)) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    for wrong, said in (({"merge_size": 99}, r"`int` <= 16 - at `\$\.merge_size`"), ({"max_pixels": 1}, "found 1,")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN | wrong))
        with pytest.raises(TextError, match=said):
            image_rule(path, found, ImageModelSection())
