"""Renders a chat as text with a model's own template, in a sandbox (`template_sandbox.py`), within bounds.

    messages       as engines give them to templates (`chat_messages.py`)
    tools          render with the template "tool_use" if the model has one
    documents, reasoning_effort, template_kwargs      variables of the template, besides the special tokens; names that
                   the rendering itself sets are refused. Source: vLLM passes `reasoning_effort` and `documents`.
    continue_final_message      the text ends with the last message, which the model continues; then there is no
                   generation prompt. Source: transformers 4.57, `render_jinja_template`.

Rendering is a function of its arguments, and of the time if a template writes it (`strftime_now`). It is aborted
when the text is too long, which is checked at each piece that the template writes, or when rendering takes too long,
which is checked in loops and calls (`template_sandbox.py`).

Whether a template expects content as a list of parts, or as a string:

    loops over a message's `content`         a list         ("openai")
    does not                                 a string       ("string")

A message is the variable of a loop over `messages`, or an indexed item of it; `messages` and a message's content may
pass through assignments, slices and filters; a bare `content` counts, since macros receive it by that name.
Source: the rule of vLLM, `--chat-template-content-format auto`. A string stays a string in both: templates that loop
check its type first, and transformers passes it so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, tee
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypedDict

from jinja2 import Template, TemplateSyntaxError, nodes
from typing_extensions import Unpack

from kv_runtime.text.chat_messages import (
    Message,
    TextError,
    Tool,
    blame_characters,
    checked_unicode,
    digest_of,
    prepared_messages,
)
from kv_runtime.text.template_sandbox import ChatContext, chat_environment

RENDERED_CHARACTERS_MAX = 1 << 26
RENDER_S = 5.0
_ASSIGNMENTS_MAX = 16
"""How many assignments are followed one after another, from a variable to the next."""
_KINDS = ("messages", "message", "content")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


class ChatOptions(TypedDict, total=False):
    """Options for rendering a chat; defaults are those of the OpenAI interface."""

    add_generation_prompt: bool
    """Whether the text ends where the answer begins; by default it does, unless the final message is continued."""
    continue_final_message: bool
    tools: Sequence[Tool] | None
    documents: Sequence[Mapping[str, Any]] | None
    reasoning_effort: str | None
    template_kwargs: Mapping[str, Any] | None


class ChatTemplate:
    """A model's own template, compiled. `digest` covers all inputs of rendering besides the chat."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        today: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `sources`: "default", and optionally "tool_use", which renders chats with tools.

        `special_tokens` are the template's variables (`bos_token`, ...). Without sources nothing is rendered. `today`
        returns the local time, as engines use it. Raises `TextError` for a template that does not parse.
        """
        environment = chat_environment(today)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            self._keeps_parts = {name: loops_over_parts(environment.parse(each)) for name, each in sources.items()}
        except TemplateSyntaxError as error:
            raise TextError("chat_template", f"line {error.lineno}: {error.message}", "a Jinja2 template") from error
        except Exception as error:  # a deep or a long expression exceeds limits of Python
            raise TextError("chat_template", f"{type(error).__name__}: {error}", "a Jinja2 template") from error
        self._base = {**environment.globals, **special_tokens, **_variables({})}
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self.digest = digest_of(json.dumps([self.sources, self.special_tokens], sort_keys=True).encode())

    def render(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Render a chat as text that is valid in UTF-8; raise `TextError` for one that the template refuses."""
        if not self._templates:
            raise TextError("chat_template", "none", "a model with a chat template")
        name = "tool_use" if options.get("tools") and "tool_use" in self._templates else "default"
        prepared = prepared_messages(messages, keeps_parts=self._keeps_parts[name])
        variables = {**self._base, "messages": prepared}
        if options:
            variables |= _variables(options)
        try:
            rendered = self._written(self._templates[name], variables)
        except TextError:
            raise
        except Exception as error:  # a template's expressions may raise anything
            raise TextError("messages", str(error), "a chat that the model's template renders") from error
        if options.get("continue_final_message"):
            rendered = _continued(rendered, prepared)
        try:
            return checked_unicode("messages", rendered)
        except TextError:
            blame_characters(prepared)
            raise

    def _written(self, template: Template, variables: dict[str, Any]) -> str:
        """Return the rendered text; raise `TextError` beyond a bound."""
        until_s = perf_counter() + RENDER_S

        def look() -> None:
            if perf_counter() > until_s:
                raise TextError("messages", "a chat that takes too long", f"at most {RENDER_S} s of rendering")

        context = ChatContext(template.environment, variables, template.name, template.blocks)
        context.look = look
        measured, pieces = tee(template.root_render_func(context))
        too_many = next(filter(RENDERED_CHARACTERS_MAX.__lt__, accumulate(map(len, measured))), 0)
        if too_many:
            raise TextError("messages", f"{too_many} characters, rendered", f"at most {RENDERED_CHARACTERS_MAX}")
        return "".join(pieces)


def read_template(
    directory: Path, instead: str = "", special_tokens: Mapping[str, str] = MappingProxyType({})
) -> ChatTemplate:
    """Return the chat template of a model's directory, or of the file `instead`, with the directory's special tokens.

    `special_tokens` are defaults for those that `tokenizer_config.json` does not name. The template is in
    `chat_template.jinja`, `tokenizer_config.json` or `chat_template.json`; without one no chat is rendered.
    Source: transformers 5.24, `tokenization_utils_base.py` and `processing_utils.py` (`from_pretrained`).

    Raises:
        TextError: names the file that cannot be read, or has something else for a template.
    """
    config = json_object(directory / "tokenizer_config.json")
    separate = Path(instead or directory / "chat_template.jinja")
    tokens = {**special_tokens, **_special_tokens(config)}
    if instead or separate.is_file():
        named = {path.stem: _text(path) for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
        return ChatTemplate({"default": _text(separate), **named}, tokens)
    for name, fields in (("tokenizer_config.json", config), ("chat_template.json", None)):
        path = directory / name
        if (found := (json_object(path) if fields is None else fields).get("chat_template")) is not None:
            return ChatTemplate(_template_sources(path, found), tokens)
    return ChatTemplate({}, tokens)


def json_object(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; an empty one if there is no such file. Raise `TextError` for anything else."""
    if not path.exists():
        return {}
    try:
        content = json.loads(file_content(path))
    except (ValueError, RecursionError) as error:
        raise TextError(str(path), str(error), "JSON") from error
    if not isinstance(content, dict):
        raise TextError(str(path), content, "an object")
    return content


def _text(path: Path) -> str:
    try:
        return file_content(path).decode()
    except UnicodeDecodeError as error:
        raise TextError(str(path), str(error), "UTF-8") from error


def file_content(path: Path) -> bytes:
    """Return the file's bytes; raise `TextError` if it cannot be read."""
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
    raise TextError(f"{path}: chat_template", found, "a template, or a list with a default one")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables `bos_token`, `eos_token` and the like; a token is a string or `{content: string}`."""
    contents = {name: each.get("content") if isinstance(each, dict) else each for name, each in config.items()}
    return {name: each for name, each in contents.items() if name.endswith("_token") and isinstance(each, str)}


def _variables(options: ChatOptions) -> dict[str, Any]:
    """Return the variables of the template that the options set."""
    given = options.get("template_kwargs") or {}
    for name in _RESERVED if given else ():
        if name in given:
            raise TextError(f"chat_template_kwargs.{name}", given[name], "variables that the rendering does not set")
    continues = options.get("continue_final_message", False)
    prompts = options.get("add_generation_prompt", not continues)
    if continues and prompts:
        raise TextError("add_generation_prompt", prompts, "false beside continue_final_message")
    effort, tools, documents = options.get("reasoning_effort"), options.get("tools"), options.get("documents")
    return {
        **({} if effort is None else {"reasoning_effort": effort}),
        **given,
        "tools": list(tools) if tools else None,
        "documents": list(documents) if documents else None,
        "add_generation_prompt": prompts,
    }


def _continued(rendered: str, messages: Sequence[Message]) -> str:
    """Return the rendered text up to the end of the last message's text, which the template may have stripped."""
    content = messages[-1]["content"] if messages else None
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    at = rendered.rfind(content.strip()) if isinstance(content, str) else -1
    if not isinstance(content, str) or at < 0:
        raise TextError("continue_final_message", "true", "a last message whose text the template writes")
    trimmed = content.lstrip()
    return rendered[: at + len(trimmed if rendered.startswith(trimmed, at) else content.strip())]


def loops_over_parts(template: nodes.Template) -> bool:
    """Return whether the parsed template loops over the parts of a message's content."""
    loops = [*template.find_all(nodes.For)]
    assigned = [(each.target, each.node) for each in template.find_all(nodes.Assign)]
    known = {(kind, kind) for kind in _KINDS}
    for _ in range(_ASSIGNMENTS_MAX):
        of_loops = {(_name(each.target), "message") for each in loops if _is("messages", each.iter, known)}
        of_assigns = {(_name(target), kind) for target, node in assigned for kind in _KINDS if _is(kind, node, known)}
        if of_loops | of_assigns <= known:
            break
        known |= of_loops | of_assigns
    return any(_is("content", each.iter, known) for each in loops)


def _name(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""


def _is(kind: str, node: Any, known: set[tuple[str, str]]) -> bool:  # noqa: ANN401 - any node, or none
    """Return whether the node is of this kind; `known` has pairs of a variable and one of its kinds."""
    while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    if isinstance(node, nodes.Name):
        return (node.name, kind) in known
    if kind == "message":
        return isinstance(node, nodes.Getitem) and _is("messages", node.node, known)
    is_content = (isinstance(node, nodes.Getattr) and node.attr == "content") or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )
    return kind == "content" and is_content and _is("message", node.node, known)
