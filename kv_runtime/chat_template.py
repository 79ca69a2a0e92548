"""A chat becomes text: its messages are checked, and a model's own template renders them in a sandbox.

Rules for a message, the same for every model:

    role        one of ROLES
    content     a string; or text parts, which are joined without anything between them;
                or null, when an assistant's message has tool_calls
    characters  whatever UTF-8 can express: no lone surrogates

Rendering is a function of its arguments: a template sees no date (`strftime_now` is not defined), no file and no
network. The environment is that of the library the templates are written for.
Source: transformers 4.57, `utils/chat_template_utils.py`, `_compile_jinja_template`.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_FOUND_CHARACTERS_MAX = 200
_DIGEST_CHARACTERS = 32


class TextError(Exception):
    """A model directory or a chat that cannot become tokens: `field` (a path), what was `found`, what is `allowed`."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {repr(found)[:_FOUND_CHARACTERS_MAX]}, allowed {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


def digest_of(content: bytes) -> str:
    """Return 32 hex digits that identify `content`: the first half of its SHA-256, as `sha256sum` prints it."""
    return sha256(content).hexdigest()[:_DIGEST_CHARACTERS]


def checked_unicode(field: str, text: str) -> str:
    """Return `text`; raise `TextError` where UTF-8 cannot express it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(field, text[error.start], "text without lone surrogates") from error
    return text


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of the messages, each with `content` a string or None; raise `TextError`, which names the place."""
    return [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _checked_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TextError(where, message, "an object")
    if message.get("role") not in ROLES:
        raise TextError(f"{where}.role", message.get("role"), f"one of {', '.join(ROLES)}")
    return {**message, "content": _checked_content(f"{where}.content", message)}


def _checked_content(where: str, message: Message) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return checked_unicode(where, content)
    if isinstance(content, list):
        return "".join(_checked_part(f"{where}[{index}]", part) for index, part in enumerate(content))
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None
    raise TextError(where, content, "a string, a list of text parts, or null beside an assistant's tool_calls")


def _checked_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise TextError(where, part, "an object")
    if part.get("type") != "text":
        raise TextError(f"{where}.type", part.get("type"), "'text'")
    if not isinstance(part.get("text"), str):
        raise TextError(f"{where}.text", part.get("text"), "a string")
    return checked_unicode(f"{where}.text", part["text"])


class ChatTemplate:
    """A model's own template, compiled. `digest` covers all that rendering depends on beside the messages."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile `sources`: "default", and where the model has it "tool_use", which renders chats with tools.

        `special_tokens` are the template's variables (`bos_token`, ...). Raises `TextError` for a template that does
        not parse.
        """
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateSyntaxError as error:
            raise TextError("chat_template", f"line {error.lineno}: {error.message}", "a Jinja2 template") from error
        self.special_tokens = dict(special_tokens)
        self.digest = digest_of(json.dumps([dict(sources), self.special_tokens], sort_keys=True).encode())

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] | None = None
    ) -> str:
        """Return the chat as the model reads it; raise `TextError` for one that the template refuses."""
        template = self._templates.get("tool_use" if tools else "default") or self._templates["default"]
        checked = [_with_parsed_calls(f"messages[{at}]", m) for at, m in enumerate(checked_messages(messages))]
        try:
            rendered = template.render(
                self.special_tokens,
                messages=checked,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template may fail in any way that an expression may
            raise TextError("messages", str(error), "a chat that the model's template renders") from error
        return checked_unicode("messages", rendered)


def read_template(directory: Path) -> ChatTemplate:
    """Return the chat template of a model's directory; raise `TextError`, which names the file, where it has none."""
    path, separate = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    try:
        config = json.loads(file_content(path))
    except ValueError as error:
        raise TextError(str(path), str(error), "JSON") from error
    if not isinstance(config, dict):
        raise TextError(str(path), config, "an object")
    if not separate.is_file():
        return ChatTemplate(_template_sources(path, config.get("chat_template")), _special_tokens(config))
    try:
        source = file_content(separate).decode()
    except UnicodeDecodeError as error:
        raise TextError(str(separate), str(error), "UTF-8") from error
    return ChatTemplate({"default": source}, _special_tokens(config))


def file_content(path: Path) -> bytes:
    """Return the file's bytes; raise `TextError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(str(path), error.strerror, "a file that can be read") from error


def _template_sources(path: Path, found: object) -> dict[str, str]:
    """Return the templates by name, from one template or a list of `{name, template}`."""
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in found if isinstance(entry, dict)]
        sources = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
        if "default" in sources:
            return sources
    raise TextError(f"{path}: chat_template", found, "a template, or a list with a default one, or chat_template.jinja")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables `bos_token`, `eos_token` and the like; a token is a string or `{content: string}`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _with_parsed_calls(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls' arguments as objects: OpenAI sends JSON in a string, templates want objects.

    Source: transformers, "Tool use" of the chat template guide.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
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
        except ValueError as error:
            raise TextError(f"{where}.function.arguments", arguments, "JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's statements in a scope of their own."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (templates name or place the arguments as they like)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
