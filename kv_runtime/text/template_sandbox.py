"""The Jinja2 environment of chat templates: a sandbox, with the additions of the library they are written for.

Source: transformers 5.24, `utils/chat_template_utils.py`, `_compile_jinja_template`. As in that library a template sees
the local time (`strftime_now`); it sees no file and no network.

A rendering looks up several attributes per message, and the sandbox's checks take twice as long as the rest. So this
environment skips them for plain dicts, strings, loops and namespaces, where they would allow the name anyway: names of
data, and of methods that neither change nor format anything.

A rendering ends in time, besides the sandbox's own bound of 100,000 numbers in a range: a loop calls its context's
`look` before it begins and at every 16th item, and so does each macro call; `look` raises when the rendering is to
end. What one expression makes has no bound: the template is the operator's, like the model.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain, islice
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_NAMES = frozenset(dir(dict))
_STRING_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_NAMES = frozenset(name for name in dir(LoopContext) if name[0] != "_")
_ITEMS_BETWEEN_LOOKS = 16
_IN_TIME = "in time"
"""The name of the filter around what a loop loops over; no template can spell it."""


class ChatContext(Context):
    """A rendering's variables; `look` is called during the rendering, and may end it by an error."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002 - as the base class has it
        """Return a context of the same rendering."""
        context = super().derived(locals)
        assert isinstance(context, ChatContext)
        context.look = self.look
        return context


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts for the types in chats, and a bound on its time."""

    context_class = ChatContext

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - as the base class
        """Return the code, whose loops call `look`."""
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _IN_TIME, [], [], None, None, lineno=loop.lineno, environment=self)
        return super()._generate(source, *args, **kwargs)

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

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805, PYI063
        """Return the sandbox's result."""
        if isinstance(__context, ChatContext):
            __context.look()
        return super().call(__context, __obj, *args, **kwargs)


def chat_environment(today: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """Return a new environment; `today` is what `strftime_now` shows."""
    environment = _ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters[_IN_TIME] = _in_time
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


@pass_context
def _in_time(context: ChatContext, items: Iterable[Any]) -> Iterable[Any]:
    """Return the items; `look` is called now, and while many of them are taken."""
    if type(items) is list and len(items) <= _ITEMS_BETWEEN_LOOKS:
        if items:
            context.look()
        return items
    many = _ITEMS_BETWEEN_LOOKS if type(items) is list else 1  # other items may be made as they are taken
    return chain.from_iterable(_looking(context.look, iter(items), many))


def _looking(look: Callable[[], None], items: Iterator[Any], many: int) -> Iterator[list[Any]]:
    look()
    while some := list(islice(items, many)):
        yield some
        look()


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
