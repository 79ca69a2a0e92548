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
_COUNTS = re.compile(
    rb'"(completion|output|prompt|input|cached)_tokens"\s*:\s*(\d{1,10})(?!\d)',
)


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
    found = dict(_COUNTS.findall(tail, at)).get
    output, cached, prompt = (
        found(b"completion") or found(b"output"),
        found(b"cached"),
        found(b"prompt") or found(b"input"),
    )
    return Usage(output and int(output), cached and int(cached), prompt and int(prompt))
