"""The end of a stream that has all of its tokens, written for a worker that died before it."""

from typing import Any

import msgspec
import pytest

from kv_protocol.continuation import DONE, Progress, progress_of, token_comment

CUT = Progress(tokens=bytes(8), id="a", created=1)


def ending(progress: Progress, *, is_chat: bool = True, prompt_tokens: int | None = 5) -> list[dict[str, Any]]:
    """Return the events before the last, which is the mark."""
    *events, mark = progress.ending("m", is_chat=is_chat, prompt_tokens=prompt_tokens).split(b"\n\n")[:-1]
    assert mark + b"\n\n" == DONE
    return [msgspec.json.decode(each.removeprefix(b"data: ")) for each in events]


@pytest.mark.parametrize(("has_usage", "usage"), [(True, []), (False, [7])])
def test_what_was_sent_already_is_not_sent_again(has_usage: bool, usage: list[int]) -> None:
    events = ending(msgspec.structs.replace(CUT, finish_reason="stop", has_usage=has_usage))
    assert [each["usage"]["total_tokens"] for each in events] == usage


def test_what_a_stream_has_sent_is_found_in_its_events() -> None:
    event = b'data: {"id":"a","created":1,"choices":[{"finish_reason":"stop"}],"usage":{"total_tokens":7}}\n\n'
    found = progress_of(token_comment([5, 6]) + event)
    assert found is not None
    assert (found.token_count, found.finish_reason, found.has_usage) == (2, "stop", True)
    assert ending(found) == []
