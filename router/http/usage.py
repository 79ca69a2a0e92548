"""Reads the token counts near the end of an answer that is otherwise passed on unread.

    "usage": {"prompt_tokens": <n>, "completion_tokens": <n>, "prompt_tokens_details": {"cached_tokens": <n>}}
    "usage": {"input_tokens": <n>, "output_tokens": <n>, "input_tokens_details": {"cached_tokens": <n>}}  of a response
    "usage": {"prompt_tokens": <n>}                                                                      of embeddings

A complete answer and a stream with usage both state it last; of several (a stream may state it with every event) the
last one counts. Source: the OpenAI API reference, "The chat completion object", "The response object", "Create
embeddings".
"""

from collections.abc import Callable

import msgspec

from router.native import built


class Usage(msgspec.Struct, frozen=True, gc=False):
    """An answer's token counts; None if not stated."""

    output_tokens: int | None
    cached_tokens: int | None
    input_tokens: int | None = None


NO_USAGE = Usage(None, None)


built.name_usage(Usage)
usage_in: Callable[[bytes], Usage] = built.usage_in
"""Parses the usage at the end of an answer."""
