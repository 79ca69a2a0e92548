"""Reads the token counts near the end of an answer that is otherwise passed on unread.

    "usage": {"prompt_tokens": <n>, "completion_tokens": <n>, "prompt_tokens_details": {"cached_tokens": <n>}}
    "usage": {"input_tokens": <n>, "output_tokens": <n>, "input_tokens_details": {"cached_tokens": <n>}}  of a response
    "usage": {"prompt_tokens": <n>}                                                                      of embeddings

A complete answer and a stream with usage both state it last; of several (a stream may state it with every event) the
last one counts. Source: the OpenAI API reference, "The chat completion object", "The response object", "Create
embeddings".
"""

import re
from typing import NamedTuple

_USAGE = b'"usage"'
_COUNT = re.compile(rb"\s*:\s*(\d{1,10})(?!\d)")


class Usage(NamedTuple):
    """An answer's token counts; None if not stated."""

    output_tokens: int | None
    cached_tokens: int | None
    input_tokens: int | None = None


NO_USAGE = Usage(None, None)


def usage_in(tail: bytes) -> Usage:
    """Parse the usage at the end of an answer."""
    at = tail.rfind(_USAGE)
    if at < 0:
        return NO_USAGE
    output_tokens = _last(tail, b'"completion_tokens"', at)
    if output_tokens is None:
        output_tokens = _last(tail, b'"output_tokens"', at)
    input_tokens = _last(tail, b'"prompt_tokens"', at)
    if input_tokens is None:
        input_tokens = _last(tail, b'"input_tokens"', at)
    return Usage(output_tokens, _last(tail, b'"cached_tokens"', at), input_tokens)


def _last(tail: bytes, key: bytes, begin: int) -> int | None:
    """Return the count behind the last such key from `begin` on; None if there is none."""
    at = tail.rfind(key, begin)
    found = None if at < 0 else _COUNT.match(tail, at + len(key))
    return None if found is None else int(found[1])
