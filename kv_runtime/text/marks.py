"""Marks: added tokens before which a text may be cut, because the tokenizer finds them in any context.

The `tokenizers` library extracts added tokens from a text first: those that are not normalized, leftmost, then longest.
The text between them is encoded separately. So a text may be cut before each of them, if no overlapping token wins. A
token is a mark when it

    is not normalized, is not `single_word`, and does not strip the space before it
    neither begins nor ends with white space, which other tokens may strip
    is part of no other such token, except as its beginning, and no token, including itself, ends with its beginning

and the template, or one of its special tokens, contains it: other marks never occur.
Source: tokenizers 0.23, `AddedVocabulary`.
"""

import re
from collections.abc import Collection, Iterable

from tokenizers import AddedToken


def mark_pattern(added: Iterable[AddedToken], written: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds the marks among the `added` tokens in `written`; without marks it matches nothing."""
    found_first = [token for token in added if not token.normalized]
    contents = [token.content for token in found_first]
    marks = [
        token.content
        for token in found_first
        if _is_steady(token, contents) and any(token.content in text for text in written)
    ]
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _is_steady(token: AddedToken, contents: list[str]) -> bool:
    content = token.content
    if not content or token.lstrip or token.single_word or content != content.strip():
        return False
    return not any(_takes(other, content) for other in contents)


def _takes(other: str, content: str) -> bool:
    """Return whether an occurrence of `other` may cover the beginning of one of `content` that begins later."""
    ends_as_it_begins = any(other.endswith(content[:length]) for length in range(1, len(content)))
    return ends_as_it_begins or content in other[1:]
