"""The Jinja2 environment of chat templates: a sandbox, with the additions of the library they are written for.

Source: transformers 5.24, `utils/chat_template_utils.py`, `_compile_jinja_template`. As in that library a template sees
the local time (`strftime_now`); it sees no file and no network.

A rendering looks up several attributes per message, and the sandbox's checks take twice as long as the rest. So this
environment skips them for plain dicts, strings, loops and namespaces, where they would allow the name anyway: names of
data, and of methods that neither change nor format anything.

A range has the sandbox's own bound of 100,000 numbers.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_NAMES = frozenset(dir(dict))
_STRING_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_NAMES = frozenset(name for name in dir(LoopContext) if name[0] != "_")


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts for the types in chats."""

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as the base class has it
        """Return the sandbox's result."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif (kind is str and attribute in _STRING_METHODS) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        elif kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - as the base class has it
        """Return the sandbox's result."""
        if type(obj) is dict:
            try:
                return obj[argument]
            except (KeyError, TypeError):
                pass
        return super().getitem(obj, argument)


def chat_environment(today: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """Return a new environment; `today` is what `strftime_now` shows."""
    environment = _ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: today().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's statements in their own scope."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


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
