"""A chat as engines give it to a template, the same for every model.

    content            a string, or a list of text parts if the template loops over parts (`chat_template.py`).
                       Null and no content are empty. As a string, text parts, plain strings among the parts, refusals
                       and thoughts are joined by newlines; a tool's message is always a string
    tool_calls         of an assistant, if there are any. `arguments` are an object; text that is no JSON becomes `{}`
    reasoning          of an assistant, under all the names that templates read
    tool_call_id, name     if they are given
    other keys         left out
    role               any text: the template knows its roles
    characters         valid in UTF-8: no lone surrogates

Source: vllm-project/vllm 0.24.0, `vllm/entrypoints/chat_utils.py` (`_parse_chat_message_content`,
`_postprocess_messages`, `_ToolParser`); SGLang (`python/sglang/srt/entrypoints/openai/serving_chat.py`,
`jinja_template_utils.py`) and TensorRT-LLM (`tensorrt_llm/serve/chat_utils.py`) treat null, parts and calls alike.

Image parts, `{"type": "image_url", "image_url": {"url": ...}}`, have to be replaced first (`split_images`), as the
model's rule for images says:

    a placeholder     a text part: the placeholder. Other text with the placeholder is refused: it would be an image
    unknown           `IMAGE`, which a template may render in any way; `UNKNOWN_FROM_HERE` precedes the first message
                      with an image: the text rendered before it equals the model's

Parts of other media (`MEDIA`) are replaced like images whose rule is unknown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

MEDIA = frozenset(
    {
        "image", "image_url", "image_pil", "image_embeds", "input_image", "audio", "audio_url", "audio_embeds",
        "input_audio", "video", "video_url", "input_video", "input_file", "file",
    }
)  # fmt: skip
"""Types of parts that are no text. Source: vLLM `chat_utils.py` (`MM_PARSER_MAP`); the OpenAI API reference."""
_OTHER_MEDIA = MEDIA - {"image_url"}
TEXT_KEYS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
"""The key of a text part's text, by its type."""
_REASONING = ("reasoning", "reasoning_content", "thinking")
"""Source: transformers 5.24, `utils/chat_template_utils.py` (`_alias_reasoning_fields`)."""
_FOUND_CHARACTERS_MAX = 200
_DIGEST_CHARACTERS = 32
IMAGES_MAX = 128
"""How many images a chat may have. Workers may accept fewer."""
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
    """A chat with parts of media where only text is allowed."""


class SplitChat(NamedTuple):
    """A chat without its image parts, and their URLs in order. `other_media`: the path of the first other media."""

    messages: list[Message]
    urls: tuple[str, ...]
    other_media: str = ""


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


def prepared_messages(messages: Sequence[Message], *, keeps_parts: bool = False) -> list[Message]:
    """Return the messages as a template gets them; with `keeps_parts` contents are lists of parts.

    Characters are not checked: `blame_characters` does that after an encoding error.

    Raises:
        TextError: names the path of what no engine takes; `HasImages` for media.
    """
    return [
        message
        if not keeps_parts and _is_plain(message)
        else _prepared(f"messages[{at}]", message, keeps_parts=keeps_parts)
        for at, message in enumerate(messages)
    ]


def _is_plain(message: object) -> bool:
    """Return whether the message is a role and a text, and nothing more."""
    if type(message) is not dict or len(message) != 2:  # noqa: PLR2004 - a role and a content
        return False
    return type(message.get("role")) is str and type(message.get("content")) is str


def blame_characters(messages: Sequence[Message]) -> None:
    """Check that all contents are valid in UTF-8; raise `TextError`, which names the first that is not."""
    for at, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            checked_unicode(f"messages[{at}].content", content)
        for part_at, part in enumerate(content if isinstance(content, list) else ()):
            checked_unicode(f"messages[{at}].content[{part_at}].text", part.get("text", ""))


def split_images(messages: Sequence[Message], placeholder: str) -> SplitChat:
    """Return the chat with `placeholder` for each image; empty: the model's rule is unknown.

    If there is other media, no image gets a placeholder: the prompt is unknown from the first medium on. Only
    media in contents are checked; the rest is checked when the chat is rendered.

    Raises:
        TextError: a malformed image part, a text with the placeholder, more than `IMAGES_MAX`.
    """
    split: list[Message] = []
    urls: list[str] = []
    other_media = next(_other_media(messages), "")
    placeholder = "" if other_media else placeholder
    is_known = True
    for at, message in enumerate(messages):
        where, content = f"messages[{at}].content", message.get("content")
        if isinstance(content, list):
            parts = [_without_image(f"{where}[{index}]", part, placeholder, urls) for index, part in enumerate(content)]
            if not placeholder and is_known and any(part is IMAGE for part in parts):
                parts.insert(0, {"type": "text", "text": UNKNOWN_FROM_HERE})
                is_known = False
            split.append({**message, "content": parts})
            continue
        if isinstance(content, str):
            _check_text(where, content, placeholder)
        split.append(message)
    return SplitChat(split, tuple(urls), other_media)


def _other_media(messages: Sequence[Message]) -> Iterator[str]:
    for at, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if _kind(part) in _OTHER_MEDIA:
                yield f"messages[{at}].content[{index}].type"


def _kind(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else ""
    return kind if isinstance(kind, str) else ""


def _without_image(where: str, part: object, placeholder: str, urls: list[str]) -> object:
    """Return the part, or the replacement of its image; append the image's URL to `urls`."""
    if _kind(part) in _OTHER_MEDIA:
        return IMAGE
    if not isinstance(part, Mapping) or _kind(part) != "image_url":
        text = part.get("text") if isinstance(part, Mapping) else part
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


def _prepared(where: str, message: object, *, keeps_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TextError(where, message, "an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise TextError(f"{where}.role", role, "a string")
    content = _content(f"{where}.content", message, keeps_parts and role != "tool")
    prepared: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            prepared["tool_calls"] = _calls(f"{where}.tool_calls", calls)
        if (reasoning := message.get("reasoning", message.get("reasoning_content"))) is not None:
            prepared |= dict.fromkeys(_REASONING, reasoning)
    if role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    if name := message.get("name"):
        prepared["name"] = name
    return prepared


def _content(where: str, message: Message, keeps_parts: bool) -> str | list[Mapping[str, Any]]:  # noqa: FBT001
    given = message.get("content")
    parts = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(parts, list):
        raise TextError(where, given, "a string, a list of parts, or null")
    texts = [part if isinstance(part, str) else _text(f"{where}[{at}]", part) for at, part in enumerate(parts)]
    if not keeps_parts:
        return "\n".join(texts)
    return [IMAGE if part is IMAGE else {"type": "text", "text": text} for part, text in zip(parts, texts, strict=True)]


def _text(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise TextError(where, part, "an object")
    if part is IMAGE:
        return ""
    if (kind := _kind(part)) in MEDIA:
        raise HasImages(f"{where}.type", kind, '"text"')
    if (key := TEXT_KEYS.get(kind)) is None:
        raise TextError(f"{where}.type", part.get("type"), ", ".join(TEXT_KEYS))
    text = part.get(key)
    if not isinstance(text, str):
        raise TextError(f"{where}.{key}", text, "a string")
    return text


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise TextError(where, calls, "a list")
    return [_call(f"{where}[{at}]", call) for at, call in enumerate(calls)]


def _call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise TextError(f"{where}.function", function, "an object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # a model wrote it: engines continue without arguments
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
