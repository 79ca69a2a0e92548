"""The Jinja2 environment of chat templates: a sandbox, with the additions of the library they are written for.

Source: transformers 5.24, `utils/chat_template_utils.py`, `_compile_jinja_template`. A template sees the local time
(`strftime_now`), as there, and no file and no network.

A rendering looks up several attributes per message, and the sandbox's checks are slow. For plain dicts, methods of
strings, loops and namespaces the result is known and returned at once: only for names of data, and of methods that
neither change nor format anything.

Bounds, besides the sandbox's own of 100,000 numbers in a range:

    time     a loop calls its context's `look` before it begins and at every 16th item, and each call of a macro does;
             `look` raises when the rendering is to end
    size     what `*`, `**`, `%`, `format`, or a method or filter of `_GROWING` would make is estimated before, and
             refused beyond `MADE_MAX` characters, items or bits
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import wraps
from itertools import chain, islice
from math import prod
from string import Formatter
from types import BuiltinMethodType
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
MADE_MAX = 1 << 26
_ITEMS_BETWEEN_LOOKS = 16
_IN_TIME = "in time"
"""The name of the filter around what a loop loops over; no template can spell it."""
_GROWING = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "indent", "batch", "slice", "format")
)
_DATE_WIDTH_MAX = 100
_WIDTH = re.compile(r"[0-9]+|[*{]")
"""A width or a precision, or the place of one that an argument states."""
_CONVERSION = re.compile(r"%(?:\([^)]*\))?([-#0 +.*0-9]*)")


class ChatContext(Context):
    """A rendering's variables; `look` is called while it goes on, and may end it by an error."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002 - as the base class has it
        """Return a context of the same rendering."""
        context = super().derived(locals)
        assert isinstance(context, ChatContext)
        context.look = self.look
        return context


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts for the types in chats, and bounds."""

    context_class = ChatContext
    intercepted_binops = frozenset(("*", "**", "%"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - as the base class
        """Return the code; its loops look at the time."""
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _IN_TIME, [], [], None, None, lineno=loop.lineno, environment=self)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Return the operator's result, unless it would be too large."""
        _check_size(_size_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

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
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str and __obj.__name__ in _STRING_METHODS:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if __obj.__name__ in _GROWING:
                _check_size(_size_of(__obj.__name__, __obj.__self__, (*args, *kwargs.values())))
            return __obj(*args, **kwargs)
        if isinstance(__context, ChatContext):
            __context.look()
        method = getattr(__obj, "__wrapped__", None)  # the sandbox wraps `str.format`
        if type(method) is BuiltinMethodType and type(method.__self__) is str:
            _check_size(_size_of_format(method.__self__, (*args, *kwargs.values())))
        return super().call(__context, __obj, *args, **kwargs)


def chat_environment(today: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """Return a new environment; `today` is what `strftime_now` shows."""
    environment = _ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters[_IN_TIME] = _in_time
    for name in _GROWING & set(environment.filters):
        environment.filters[name] = _bounded(name, environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: _strftime(today(), form)
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
    """Return the items; the time is looked at now, and while many of them are taken."""
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


def _bounded(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a bound on the size of what it makes."""
    passed = hasattr(plain, "jinja_pass_arg")  # then its first argument is not the value

    @wraps(plain)
    def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as each filter has them
        _, value, *rest = args if passed else (None, *args)
        _check_size(_size_of(name, value, (*rest, *kwargs.values())))
        return plain(*args, **kwargs)

    return bounded


def _check_size(size: int) -> None:
    if size > MADE_MAX:
        raise TemplateError(f"a value of {size} characters or items, allowed {MADE_MAX}")


def _size_of_binop(operator: str, left: Any, right: Any) -> int:  # noqa: ANN401
    """Return how large the result is, in characters, items, or bits times 64: large numbers are slow; 0: not large."""
    if operator == "%":
        given = right if isinstance(right, tuple) else (right,)
        return _size_of("format", left, given) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return 64 * bits
    times, each = (left, right) if isinstance(left, int) else (right, left)
    return times * len(each) if isinstance(times, int) and isinstance(each, (str, list, tuple)) else 0


def _size_of(name: str, value: object, args: tuple[Any, ...]) -> int:
    """Return about how large the result of a method or a filter of `_GROWING` is."""
    width = max((arg for arg in args if isinstance(arg, int)), default=0)
    if name == "join":  # of a separator and items, or of items and a separator
        joined = [each for each in (value, *args) if isinstance(each, (str, list, tuple))]
        texts = sum(len(each) for items in joined if not isinstance(items, str) for each in items if type(each) is str)
        return texts + prod(map(len, joined[:2]))
    if not isinstance(value, str):
        return width
    if name == "format":
        return _size_of_widths((found[1] for found in _CONVERSION.finditer(value)), width)
    if name == "replace":
        old, new, *_ = [*(each for each in args if isinstance(each, str)), "", ""]
        return len(value) + value.count(old) * len(new) if len(value) * len(new) > MADE_MAX else 0
    repeated = {"indent": "\n", "expandtabs": "\t"}.get(name)
    return width if repeated is None else (value.count(repeated) + 1) * width


def _size_of_format(text: str, args: tuple[Any, ...]) -> int:
    """Return the sum of the widths in the text of `str.format`."""
    specs = []
    with suppress(ValueError):  # a broken text fails where it is formatted
        specs += [spec for _, _, spec, _ in Formatter().parse(text) if spec]
    return _size_of_widths(specs, max((arg for arg in args if isinstance(arg, int)), default=0))


def _size_of_widths(specs: Iterable[str], given: int) -> int:
    """Return the sum of the widths and precisions; `given` stands for each that an argument states."""
    numbers = [number for spec in specs for number in _WIDTH.findall(spec)]
    if any(len(number) > len(str(MADE_MAX)) for number in numbers):
        return MADE_MAX + 1
    return sum(int(number) if number.isdecimal() else given for number in numbers)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (templates name or place the arguments as they like)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime(today: datetime, form: object) -> str:
    if not isinstance(form, str) or _size_of_widths((form,), 0) > _DATE_WIDTH_MAX:
        raise TemplateError(f"strftime_now: found {str(form)[:_DATE_WIDTH_MAX]!r}, allowed a form without large widths")
    return today.strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
