"""Checks of a chat before a template renders it, the same for every model.

    role        one of ROLES
    content     a string; or text parts; or null, when an assistant's message has tool_calls
    characters  valid in UTF-8: no lone surrogates

Text parts become what the template expects (`content_format.py`): a list of parts, or one string, the parts joined with
a newline. Source: vLLM `entrypoints/chat_utils.py` and TensorRT-LLM `serve/chat_utils.py` join so.

Image parts, `{"type": "image_url", "image_url": {"url": ...}}`, have to be replaced first (`split_images`), with the
model's rule for images:

    a placeholder     a text part: the placeholder. Other text with the placeholder is refused: it would be an image
    unknown           `IMAGE`, which a template may render in any way; `UNKNOWN_FROM_HERE` precedes the first message
                      with an image: the text rendered before it equals the model's
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_FOUND_CHARACTERS_MAX = 200
_DIGEST_CHARACTERS = 32
IMAGES_MAX = 128
"""Images of one chat. Workers may accept fewer."""
IMAGE: Mapping[str, Any] = {"type": "image"}
"""The part that templates check for. Only this very object counts, not an equal part of a client."""
UNKNOWN_FROM_HERE = "\ue0fe\ue0ff"
"""Private-use characters, absent from normal text; in a client's text they only shorten the known beginning."""


class TextError(Exception):
    """A model directory or a chat that cannot be encoded: `field` (a path), what was `found`, what is `allowed`."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {repr(found)[:_FOUND_CHARACTERS_MAX]}, allowed {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


class HasImages(TextError):
    """A chat with image parts where only text is allowed."""


class SplitChat(NamedTuple):
    """A chat without its image parts, and their URLs in order."""

    messages: list[Message]
    urls: tuple[str, ...]


def digest_of(content: bytes) -> str:
    """Return 32 hex digits that identify `content`: the first half of its SHA-256, as `sha256sum` prints it."""
    return sha256(content).hexdigest()[:_DIGEST_CHARACTERS]


def checked_unicode(field: str, text: str) -> str:
    """Return `text`; raise `TextError` if it is not valid in UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(field, text[error.start], "text without lone surrogates") from error
    return text


def checked_messages(messages: Sequence[Message], *, keeps_parts: bool = False) -> list[Message]:
    """Return the messages, `content` a string or None, with `keeps_parts` also a list of text parts.

    Characters are not checked: `blame_characters` does that after an encoding error.

    Raises:
        TextError: names the path.
    """
    return [
        message
        if type(message) is dict and type(message.get("content")) is str and message.get("role") in ROLES
        else _checked_message(f"messages[{at}]", message, keeps_parts=keeps_parts)
        for at, message in enumerate(messages)
    ]


def blame_characters(messages: Sequence[Message]) -> None:
    """Check that all contents are valid in UTF-8; raise `TextError`, which names the first that is not."""
    for at, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            checked_unicode(f"messages[{at}].content", content)
        for part_at, part in enumerate(content if isinstance(content, list) else ()):
            checked_unicode(f"messages[{at}].content[{part_at}].text", part.get("text", ""))


def with_parsed_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with their calls' arguments as objects: OpenAI sends JSON in a string.

    Templates want objects. Source: transformers, "Tool use" of the chat template guide.
    """
    return [
        _with_parsed_calls(f"messages[{at}]", message) if message.get("tool_calls") else message
        for at, message in enumerate(messages)
    ]


def split_images(messages: Sequence[Message], placeholder: str) -> SplitChat:
    """Return the chat with `placeholder` for each image; empty: the model's rule is unknown.

    Only images in contents are checked; the rest is checked when the chat is rendered.

    Raises:
        TextError: a malformed image part, a text with the placeholder, more than `IMAGES_MAX`.
    """
    split: list[Message] = []
    urls: list[str] = []
    for at, message in enumerate(messages):
        where, content = f"messages[{at}].content", message.get("content")
        if isinstance(content, list):
            before = len(urls)
            parts = [_without_image(f"{where}[{index}]", part, placeholder, urls) for index, part in enumerate(content)]
            if not placeholder and urls and not before:
                parts.insert(0, {"type": "text", "text": UNKNOWN_FROM_HERE})
            split.append({**message, "content": parts})
            continue
        if isinstance(content, str):
            _check_text(where, content, placeholder)
        split.append(message)
    return SplitChat(split, tuple(urls))


def _without_image(where: str, part: object, placeholder: str, urls: list[str]) -> object:
    """Return the part, or the replacement of its image; append the image's URL to `urls`."""
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        text = part.get("text") if isinstance(part, Mapping) else None
        _check_text(f"{where}.text", text if isinstance(text, str) else "", placeholder)
        return part
    if len(urls) >= IMAGES_MAX:
        raise TextError(where, f"more than {IMAGES_MAX} images", f"at most {IMAGES_MAX}")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else None
    if not isinstance(url, str) or not url:
        raise TextError(f"{where}.image_url", image, "an object whose `url` is a string, not empty")
    urls.append(url)
    return {"type": "text", "text": placeholder} if placeholder else IMAGE


def _check_text(where: str, text: str, placeholder: str) -> None:
    if placeholder and placeholder in text:
        raise TextError(where, placeholder, "text without what stands for an image")


def _checked_message(where: str, message: object, *, keeps_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TextError(where, message, "an object")
    if message.get("role") not in ROLES:
        raise TextError(f"{where}.role", message.get("role"), f"one of {', '.join(ROLES)}")
    return {**message, "content": _checked_content(f"{where}.content", message, keeps_parts=keeps_parts)}


def _checked_content(where: str, message: Message, *, keeps_parts: bool) -> str | list[Any] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_checked_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
        return content if keeps_parts else "\n".join(texts)
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None
    raise TextError(where, content, "a string, a list of text parts, or null beside an assistant's tool_calls")


def _checked_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise TextError(where, part, "an object")
    if part is IMAGE:
        return ""
    if part.get("type") == "image_url":
        raise HasImages(f"{where}.type", "image_url", '"text"')
    if part.get("type") != "text":
        raise TextError(f"{where}.type", part.get("type"), '"text"')
    text = part.get("text")
    if not isinstance(text, str):
        raise TextError(f"{where}.text", text, "a string")
    return text


def _with_parsed_calls(where: str, message: Message) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise TextError(f"{where}.tool_calls", calls, "a list")
    return {**message, "tool_calls": [_parsed_call(f"{where}.tool_calls[{at}]", c) for at, c in enumerate(calls)]}


def _parsed_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise TextError(f"{where}.function", function, "an object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise TextError(f"{where}.function.arguments", arguments, "JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}
