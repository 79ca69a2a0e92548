"""Reads a model's image tokens from its directory's `config.json` and `preprocessor_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv_protocol.errors import LimitExceeded
from kv_protocol.images import ImageRule
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from worker_agent.media.config import ImageModelSection
from worker_agent.media.image_models import ImageFacts, ImageFactsInvalid, image_facts, image_rule

_PROCESSOR = "preprocessor_config.json"


def model_config(model_path: str, name: str = "config.json") -> Mapping[str, Any]:
    """Return a file of the model's directory; empty if it is missing, as for the built-in model.

    Raises:
        TextError: it cannot be read, or is no JSON object.
    """
    path = Path(model_path) / name
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(str(path), str(error), "JSON") from error
    if not isinstance(config, dict):
        raise TextError(str(path), type(config).__name__, "a JSON object")
    return config


def load_image_facts(model_path: str, text: Text, section: ImageModelSection) -> ImageFacts | None:
    """Return the image token and placeholder of the model's chats; None if it takes no images.

    Raises:
        TextError: they are unknown, or do not fit the model's tokenizer.
    """
    texts = {token: special for special, token in text.special_ids.items()}
    try:
        return image_facts(
            model_config(model_path),
            placeholder=section.placeholder,
            token_id=section.token_id,
            text_of=lambda token: texts.get(token, ""),
            encode=lambda placeholder: text.encode(placeholder, add_special_tokens=False),
        )
    except ImageFactsInvalid as error:
        raise TextError(model_path, str(error), "images.placeholder and images.token_id that fit the model") from error


def load_image_rule(model_path: str, facts: ImageFacts | None, section: ImageModelSection) -> ImageRule | None:
    """Return the registration's image rule; None if the model takes no images, or their tokens cannot be counted.

    Raises:
        TextError: a number is out of its range.
    """
    if facts is None:
        return None
    try:
        return image_rule(
            facts,
            model_config(model_path),
            model_config(model_path, _PROCESSOR),
            tokens_per_image=section.tokens_per_image,
            cached_token_id=section.cached_token_id,
        )
    except LimitExceeded as error:
        raise TextError(error.field, error.found, error.allowed) from error
