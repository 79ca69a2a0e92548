"""Detects whether a template expects content as a list of parts, or as a string.

    loops over a message's `content`         a list         ("openai")
    does not                                 a string       ("string")

A message is the variable of a loop over `messages`, or an indexed item of it; `messages` and a message's content may
pass through assignments, slices and filters; a bare `content` counts, since macros receive it by that name.
Source: the rule of vLLM, `--chat-template-content-format auto`. A string stays a string in both: templates that loop
check its type first, and transformers passes it so.
"""

from collections.abc import Callable, Iterator

from jinja2 import nodes

_NEVER_MORE_THAN = 16
"""Assignments of assignments that are followed."""


def loops_over_parts(template: nodes.Template) -> bool:
    """Return whether the parsed template loops over the parts of a message's content."""
    lists = _aliases(template, {"messages"}, _is_list)
    messages = {_name(loop.target) for loop in template.find_all(nodes.For) if _is_list(loop.iter, lists)}
    messages = _aliases(template, messages | {"message"}, lambda node, names: _is_message(node, names, lists))
    contents = _aliases(template, {"content"}, lambda node, names: _is_content(node, names, messages, lists))
    return any(_is_content(loop.iter, contents, messages, lists) for loop in template.find_all(nodes.For))


def _aliases(template: nodes.Template, names: set[str], is_one: Callable[[nodes.Node, set[str]], bool]) -> set[str]:
    """Return `names` and all variables that are assigned one of them."""
    for _ in range(_NEVER_MORE_THAN):
        more = {name for name, value in _assignments(template) if is_one(value, names)}
        if more <= names:
            break
        names = names | more
    return names


def _assignments(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assign in template.find_all(nodes.Assign):
        if name := _name(assign.target):
            yield name, assign.node


def _name(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""


def _plain(node: nodes.Node | None) -> nodes.Node | None:
    """Return the node without filters and slices around it."""
    while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    return node


def _is_list(node: nodes.Node, names: set[str]) -> bool:
    plain = _plain(node)
    return isinstance(plain, nodes.Name) and plain.name in names


def _is_message(node: nodes.Node | None, names: set[str], lists: set[str]) -> bool:
    plain = _plain(node)
    if isinstance(plain, nodes.Getitem) and not isinstance(plain.arg, nodes.Slice):
        return _is_list(plain.node, lists)
    return isinstance(plain, nodes.Name) and plain.name in names


def _is_content(node: nodes.Node, names: set[str], messages: set[str], lists: set[str]) -> bool:
    plain = _plain(node)
    if isinstance(plain, nodes.Getattr) and plain.attr == "content":
        return _is_message(plain.node, messages, lists)
    if isinstance(plain, nodes.Getitem) and isinstance(plain.arg, nodes.Const) and plain.arg.value == "content":
        return _is_message(plain.node, messages, lists)
    return isinstance(plain, nodes.Name) and plain.name in names
