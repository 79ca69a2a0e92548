"""What an engine may write under a structural tag, as xgrammar 0.1.32 reads it; an unknown key or type is a KeyError.

`make engines` compares it with that release. Here a JSON schema is not read: every object of up to four levels fits it.
Source: mlc-ai/xgrammar 0.1.32, `python/xgrammar/structural_tag.py`.
"""

import re
from functools import reduce
from typing import Any

Format = dict[str, Any]

_STRING, _OTHER = r'"(?:[^"\\]|\\.)*"', r'[^"{}]'
_OBJECT = reduce(lambda inner, _: rf"\{{(?:{_STRING}|{_OTHER}|{inner})*\}}", range(4), "(?!)")


def accepts(tag: Format, text: str) -> bool:
    """Return whether the text is a whole answer under the tag."""
    assert tag.keys() == {"type", "format"}
    assert tag["type"] == "structural_tag"
    return re.fullmatch(_pattern(tag["format"], ""), text, re.DOTALL) is not None


def _pattern(form: Format, end: str) -> str:
    """Return the pattern of a format that stands before the text `end`."""
    form = dict(form)
    kind = form.pop("type")
    match kind:
        case "const_string":
            pattern = re.escape(str(form.pop("value")))
        case "regex":
            pattern = f"(?:{form.pop('pattern')})"
        case "json_schema":
            form.pop("json_schema")
            pattern = _OBJECT
        case "any_text":
            without = [each for each in (end, *form.pop("excludes", ())) if each]
            pattern = f"(?:(?!{'|'.join(map(re.escape, without))}).)*?" if without else ".*?"
        case "sequence":
            pattern = _sequence(form.pop("elements"), end)
        case "or":
            pattern = f"(?:{'|'.join(_pattern(each, end) for each in form.pop('elements'))})"
        case "tag":
            begin, own = str(form.pop("begin")), str(form.pop("end"))
            pattern = re.escape(begin) + _pattern(form.pop("content"), own) + re.escape(own)
        case "tags_with_separator":
            one = f"(?:{'|'.join(_pattern(each, end) for each in form.pop('tags'))})"
            separator, at_least_one = form.pop("separator"), form.pop("at_least_one")
            more = "" if form.pop("stop_after_first") else f"(?:{re.escape(separator)}{one})*"
            pattern = f"{one}{more}" if at_least_one else f"(?:{one}{more})?"
        case _:
            raise KeyError(kind)
    if form:
        raise KeyError(*form)
    return pattern


def _sequence(elements: list[Format], end: str) -> str:
    *before, last = elements
    return "".join(_pattern(each, "") for each in before) + _pattern(last, end)
