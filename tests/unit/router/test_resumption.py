"""Streams of an attached vLLM with token ids: what the client gets, and how another vLLM continues them.

The engine is `tests/support/vllm_server.py`. Every cut of a stream is tried: the events before it from one engine, the
rest from another, must be the text, the finish reason and the usage of an undisturbed stream.
"""

from typing import Any

import msgspec
import pytest

from kv_protocol.continuation import Progress, progress_of
from kv_protocol.openai.inbound import CHAT, COMPLETIONS, ChatInbound, CompletionInbound
from kv_runtime.text.byte_model import ByteText
from router.http.stream_replay import StreamReplayBuffer, without_ids
from router.request.resumption import (
    CannotResume,
    EventRewriter,
    asking,
    behind,
    check_text_only,
    may_be_asked,
    resume_point,
    resumed_body,
    stops_of,
)
from tests.support.vllm_server import MODEL_LEN, stream_events

CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
COMPLETION_BODY: dict[str, Any] = {"model": "m", "prompt": "once", "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
SHAPES = {
    "chat": (CHAT, CHAT_BODY | {"max_tokens": 60}),
    "chat-usage": (CHAT, CHAT_BODY | {"max_completion_tokens": 60} | USAGE),
    "chat-continuous": (
        CHAT,
        CHAT_BODY | {"max_tokens": 60, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat-stop": (CHAT, CHAT_BODY | {"max_tokens": 400, "stop": ["END", "nothing"]} | USAGE),
    "completion": (COMPLETIONS, COMPLETION_BODY | {"max_tokens": 60}),
    "completion-default": (COMPLETIONS, COMPLETION_BODY),
    "completion-usage": (COMPLETIONS, COMPLETION_BODY | {"max_tokens": 60} | USAGE),
    "completion-stop": (COMPLETIONS, COMPLETION_BODY | {"max_tokens": 400, "stop": "日本語 "}),
}


def inbound_of(path: str, body: dict[str, Any]) -> ChatInbound | CompletionInbound:
    kind: type[ChatInbound | CompletionInbound] = ChatInbound if path == CHAT else CompletionInbound
    return msgspec.json.decode(msgspec.json.encode(body), type=kind)


def asked(path: str, body: dict[str, Any], **more: Any) -> list[bytes]:
    """Return the events of an engine that is asked for ids as the router asks."""
    sent = b"".join(bytes(part) for part in asking(msgspec.json.encode(body)))
    return list(stream_events(path, msgspec.json.decode(sent), **more))


def answered(events: bytes) -> tuple[str, list[str], list[dict[str, int]]]:
    """Return text, finish reasons and usages of a client's stream, which is complete and of one shape."""
    assert events.endswith(b"data: [DONE]\n\n")
    assert events.count(b"[DONE]") == 1
    text, reasons, usages = "", list[str](), list[dict[str, int]]()
    for line in events.split(b"\n\n")[:-2]:
        event = msgspec.json.decode(line.removeprefix(b"data: "))
        assert (event["id"], event["created"]) == ("chatcmpl-1", 7)
        for choice in event["choices"]:
            text += choice["delta"]["content"] if "delta" in choice else choice["text"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        usages += [event["usage"]] if event.get("usage") else []
    return text, reasons, usages


def resumed(path: str, body: dict[str, Any], progress: Progress) -> tuple[bytes, bytes, Progress]:
    """Return what the client gets of the next engine, that engine's own events, and where it continued."""
    inbound = inbound_of(path, body)
    point = resume_point(progress, ByteText().detokenizer().push, stops_of(inbound))
    before = behind(progress, point)
    sent = resumed_body(msgspec.json.encode(body), inbound, before, max_seq_len=MODEL_LEN)
    events = list(stream_events(COMPLETIONS, msgspec.json.decode(sent), name="cmpl-2", created=9))
    buffer = StreamReplayBuffer(rewriter=EventRewriter(inbound, before, point.held), before=before)
    return b"".join(buffer.add(each) for each in events), b"".join(events), before


# ------------------------------------------------------------------------------------------------- what clients get
@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_gets_what_the_engine_sends_to_those_who_ask_for_no_ids(shape: str) -> None:
    path, body = SHAPES[shape]
    buffer = StreamReplayBuffer(rewriter=without_ids)
    with_ids, without = asked(path, body), list(stream_events(path, body))
    assert b"".join(with_ids) != b"".join(without)
    assert [buffer.add(each) for each in with_ids] == without
    assert buffer.kept.events == b"".join(with_ids)


def test_events_that_are_sent_only_for_their_ids_are_left_out() -> None:
    path, body = SHAPES["chat"]
    with_ids, without = asked(path, body, parses=True), list(stream_events(path, body, parses=True))
    assert len(with_ids) > len(without)
    assert without_ids(b"".join(with_ids)) == b"".join(without)
    assert b"".join(map(without_ids, with_ids)) == b"".join(without)


def test_text_that_looks_like_ids_is_kept() -> None:
    text = 'my "token_ids":[1,2] and "delta":{},"finish_reason":null'
    event = b"data: " + msgspec.json.encode({"choices": [{"text": text, "token_ids": [1]}]}) + b"\n\n"
    assert without_ids(event) == event.replace(b',"token_ids":[1]', b',"token_ids":null')


def test_a_client_that_asked_itself_keeps_the_ids() -> None:
    path, body = SHAPES["chat"]
    events = list(stream_events(path, body | {"return_token_ids": True}))
    assert [StreamReplayBuffer().add(each) for each in events] == events


# ------------------------------------------------------------------------------------------------- the continuation
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_resumes_without_a_seam_wherever_it_is_cut(shape: str) -> None:
    path, body = SHAPES[shape]
    whole, events = answered(b"".join(stream_events(path, body))), asked(path, body)
    resumed_at = 0
    for cut in range(1, len(events)):
        progress = progress_of(b"".join(events[:cut]))
        assert progress is not None
        if progress.finish_reason is not None:
            continue
        more, _, _ = resumed(path, body, progress)
        text, reasons, usages = answered(without_ids(b"".join(events[:cut])) + more)
        assert (text, reasons, usages[-1:]) == (whole[0], whole[1], whole[2][-1:]), cut
        resumed_at += 1
    assert resumed_at > len(events) // 2


@pytest.mark.parametrize("shape", ["chat-usage", "completion-stop"])
def test_a_stream_resumes_twice(shape: str) -> None:
    path, body = SHAPES[shape]
    whole, events = answered(b"".join(stream_events(path, body))), asked(path, body)
    first = progress_of(b"".join(events[:7]))
    assert first is not None
    for cut in range(1, 9):
        got, sent, before = resumed(path, body, first)
        part = b"".join(each + b"\n\n" for each in sent.split(b"\n\n")[:cut])
        shown = b"".join(each + b"\n\n" for each in got.split(b"\n\n")[:cut])
        second = progress_of(part, before)
        assert second is not None
        more, _, _ = resumed(path, body, second)
        text, reasons, _ = answered(without_ids(b"".join(events[:7])) + shown + more)
        assert (text, reasons) == whole[:2], cut


def test_a_cut_chat_keeps_the_form_of_its_events() -> None:
    path, body = SHAPES["chat-usage"]
    whole, events = list(stream_events(path, body)), asked(path, body)
    progress = progress_of(b"".join(events[:4]))
    assert progress is not None
    more, _, _ = resumed(path, body, progress)

    def forms(events: list[bytes]) -> set[tuple[str, ...]]:
        decoded = [msgspec.json.decode(each.removeprefix(b"data: ")) for each in events]
        return {(*each, "/", *(key for choice in each["choices"] for key in choice)) for each in decoded}

    assert forms([each for each in more.split(b"\n\n") if each.startswith(b"data: {")]) == forms(whole[4:-1])


def test_a_stream_that_was_cut_behind_its_last_token_lacks_only_its_end() -> None:
    path, body = SHAPES["chat-usage"]
    events = asked(path, body)
    progress = progress_of(b"".join(events[:-2]))
    assert progress is not None
    assert (progress.finish_reason, progress.token_count, progress.has_usage) == ("length", 60, False)


def test_ids_that_the_client_has_are_not_told_again() -> None:
    path, body = SHAPES["completion"]
    body = body | {"return_token_ids": True}
    events = list(stream_events(path, body))
    progress = progress_of(b"".join(events[:3]))
    assert progress is not None
    more, _, before = resumed(path, body, progress)
    later = progress_of(more, before)
    whole = progress_of(b"".join(events))
    assert later is not None
    assert whole is not None
    assert (before.token_count, later.tokens) == (progress.token_count, whole.tokens)


def test_another_tokenizer_in_the_router_does_for_events_of_one_id() -> None:
    ids = Progress(tokens=b"\1\0\0\0\2\0\0\0", id="a", created=1, text="xy", text_tokens=2, last_tokens=1)
    assert resume_point(ids, ByteText().detokenizer().push, ()) == (2, "")
    several = msgspec.structs.replace(ids, last_tokens=2)
    for progress, stops in ((several, ()), (ids, ("END",))):
        with pytest.raises(CannotResume):
            resume_point(progress, ByteText().detokenizer().push, stops)


def test_an_answer_that_is_parsed_is_not_resumed() -> None:
    path, body = SHAPES["chat"]
    progress = progress_of(b"".join(asked(path, body, parses=True)[:9]))
    assert progress is not None
    with pytest.raises(CannotResume):
        resume_point(progress, ByteText().detokenizer().push, ())


def test_a_vllm_that_tells_no_ids_leaves_no_progress() -> None:
    assert progress_of(b"".join(list(stream_events(*SHAPES["chat"]))[:5])) is None


# ------------------------------------------------------------------------------------------------- what is asked
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"logprobs": True}),
        (COMPLETIONS, {"logprobs": 0}),
        (CHAT, {"prompt_logprobs": 0}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"suffix": "x"}),
        (COMPLETIONS, {"best_of": 2}),
        (CHAT, {"use_beam_search": True}),
        (CHAT, {"return_token_ids": False}),
        (CHAT, {"stop": "a", "include_stop_str_in_output": True}),
        (CHAT, {"stop": "a", "min_tokens": 3}),
    ],
)
def test_what_cannot_be_resumed_is_not_asked_for_ids(path: str, more: dict[str, Any]) -> None:
    plain = CHAT_BODY if path == CHAT else COMPLETION_BODY
    assert may_be_asked(inbound_of(path, plain))
    assert not may_be_asked(inbound_of(path, plain | more))


def test_an_option_that_is_off_does_not_matter() -> None:
    assert may_be_asked(inbound_of(CHAT, CHAT_BODY | {"logprobs": False, "use_beam_search": False, "seed": 3}))


def test_media_of_a_prompt_are_not_in_its_ids() -> None:
    url = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    texts = [{"type": "text", "text": "x"}]
    check_text_only(inbound_of(CHAT, CHAT_BODY | {"messages": [{"role": "user", "content": texts}]}))
    with pytest.raises(CannotResume):
        check_text_only(inbound_of(CHAT, CHAT_BODY | {"messages": [{"role": "user", "content": [*texts, url]}]}))
