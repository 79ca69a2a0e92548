"""Streams whose worker fails in their midst, over real sockets: they go on with another call, end, or say they cannot.

And calls that can be had once: they are not sent twice, and outlive the client for as long as it takes to be heard.
"""

import asyncio
from collections.abc import Sequence

import pytest

from kv_protocol.continuation import token_comment
from router.http.exchange import BUFFERED_BYTES_MAX
from tests.system.integration.http.serving import Http, get, in_two, post, until, with_worker
from tests.unit.router.upstream import (
    DONE,
    STREAM_HEAD,
    Exchange,
    Script,
    answers,
    chunked,
    completion,
    event,
    says,
    says_and_waits,
    streams,
)

ONE, TWO, THREE = event("one"), event("two"), event("three")
DIED = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
"""What vLLM writes into a stream when its engine core dies; `[DONE]` follows."""
KEPT = 1 << 20


def in_turn(*scripts: Script) -> Script:
    """Do these, one for each request."""
    left = list(scripts)

    async def script(exchange: Exchange) -> None:
        await left.pop(0)(exchange)

    return script


def cut_after(*parts: bytes) -> Script:
    """Stream these and close the connection."""
    return says(STREAM_HEAD + b"".join(map(chunked, parts)))


async def asked(http: Http, at_cut: Sequence[bytes | None], data: bytes = post()) -> bytes:
    """Return the body of the stream that the client gets; the connection has to be fit for the next request."""
    http.kept_bytes, http.at_cut = KEPT, list(at_cut)
    answer = await http.ask(data)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    return answer.body


async def test_a_stream_goes_on_with_the_next_call_and_shows_nothing_of_it() -> None:
    script = in_turn(cut_after(ONE, TWO[:-5]), cut_after(TWO), streams(THREE, DONE))
    async with with_worker(script) as (http, _):
        assert await asked(http, [b"", b""]) == ONE + TWO + THREE + DONE
        assert [watcher.heard[-1].split(":")[0] for watcher in http.watchers] == ["cut body", "cut body", "end"]
        assert [kept.kept.events for kept in http.kept[:2]] == [ONE, TWO]


async def test_a_stream_of_a_client_of_http_1_0_goes_on_too() -> None:
    script = in_turn(cut_after(ONE), streams(TWO, DONE))
    async with with_worker(script) as (http, _):
        http.kept_bytes, http.at_cut = KEPT, [b""]
        reader, _ = await http.dial(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await reader.read()).endswith(b"\r\n\r\n" + ONE + TWO + DONE)


async def test_a_stream_that_is_whole_without_its_worker_is_ended() -> None:
    async with with_worker(cut_after(ONE)) as (http, _):
        assert await asked(http, [TWO + DONE]) == ONE + TWO + DONE


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event() -> None:
    async with with_worker(cut_after(ONE)) as (http, _):
        body = await asked(http, [None])
        assert body.startswith(ONE)
        assert b"upstream_failed" in body
        assert body.endswith(DONE)
        assert [each.split(":")[0] for each in http.watcher.heard][-2:] == ["cut body", "failed body begun"]


async def test_a_stream_does_not_go_on_within_an_event() -> None:
    half = b"data: " + b"x" * (BUFFERED_BYTES_MAX + 1000)
    async with with_worker(in_turn(cut_after(ONE, half), streams(TWO, DONE))) as (http, _):
        body = await asked(http, [b""])
    assert body.startswith(ONE + half)
    assert TWO not in body
    assert b"upstream_failed" in body
    async with with_worker(in_turn(streams(ONE, half), streams(TWO, DONE))) as (http, _):
        assert await asked(http, [b""]) == ONE + half


@pytest.mark.parametrize("behind", [b": [DONE] was said\n\n", b"data:[DONE] [DONE]\n\n"])
async def test_a_stream_is_complete_though_its_mark_is_named_behind_it(behind: bytes) -> None:
    async with with_worker(streams(ONE, DONE, behind)) as (http, _):
        assert await asked(http, [b""]) == ONE + DONE + behind
        assert [each for each in http.watcher.heard if each.startswith("cut")] == []


async def test_a_text_that_names_the_mark_does_not_end_a_stream() -> None:
    named = event("[DONE]")
    async with with_worker(in_turn(streams(ONE, named), streams(TWO, DONE))) as (http, _):
        assert await asked(http, [b""]) == ONE + named + TWO + DONE


@pytest.mark.parametrize("second", [answers(200, completion()), says(b""), says(b"HTTP/1.1 200 OK\r\n")])
async def test_an_answer_that_is_no_stream_does_not_go_on_with_one(second: Script) -> None:
    async with with_worker(in_turn(cut_after(ONE), second)) as (http, _):
        body = await asked(http, [b"", None])
        assert body.startswith(ONE)
        assert body.count(b"data: ") == 3
        assert b"upstream_failed" in body


async def test_a_stream_that_ends_without_its_mark_may_go_on_or_ends_as_it_did() -> None:
    async with with_worker(in_turn(streams(ONE), streams(TWO, DONE), streams(ONE))) as (http, _):
        assert await asked(http, [b""]) == ONE + TWO + DONE
        assert await asked(http, [None]) == ONE


async def test_an_empty_stream_in_which_another_was_to_go_on_is_cut_at_once() -> None:
    empty = says_and_waits(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n")
    async with with_worker(in_turn(cut_after(ONE), empty, streams(TWO, DONE))) as (http, _):
        assert await asked(http, [b"", b""]) == ONE + TWO + DONE
        assert http.watchers[1].heard[-1] == "cut first_byte: no bytes"


@pytest.mark.parametrize("bytes_at_a_time", [1, 7, 1000])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_a_stream_in_which_an_attached_engine_reports_its_death_goes_on(
    version: bytes, bytes_at_a_time: int
) -> None:
    died = STREAM_HEAD + b"".join(map(chunked, [ONE, DIED, DONE])) + b"0\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        for at in range(0, len(died), bytes_at_a_time):
            await exchange.send(died[at : at + bytes_at_a_time])
            await asyncio.sleep(0)

    async with with_worker(in_turn(script, streams(TWO, DONE))) as (http, _):
        http.is_engines, http.kept_bytes, http.at_cut = True, KEPT, [b""]
        assert (await http.ask(post().replace(b"HTTP/1.1", version))).body == ONE + TWO + DONE
        assert http.watchers[0].heard[-1] == "cut body: an error event, code 500: EngineCore died"
        assert http.kept[0].kept.events == ONE


async def test_an_engine_that_reports_its_death_first_of_all_is_one_that_did_not_answer() -> None:
    async with with_worker(in_turn(streams(DIED, DONE), streams(ONE, DONE))) as (http, _):
        http.is_engines, http.tries = True, 1
        assert await asked(http, []) == ONE + DONE
        assert http.watchers[0].heard[-1] == "failed first_byte: an error event, code 500: EngineCore died"


async def test_a_death_that_is_reported_behind_the_mark_changes_nothing() -> None:
    async with with_worker(streams(ONE, DONE + DIED)) as (http, _):
        http.is_engines = True
        assert await asked(http, []) == ONE + DONE
        assert http.watcher.heard[-1] == "end"


async def test_a_reported_death_behind_which_nothing_can_go_on_ends_with_our_error_event() -> None:
    async with with_worker(streams(ONE, DIED, DONE)) as (http, _):
        http.is_engines = True
        body = await asked(http, [None])
        assert body.startswith(ONE + b"data: ")
        assert b"code 500: EngineCore died" in body
        assert b"upstream_failed" in body
        assert body.endswith(DONE)


@pytest.mark.parametrize(
    ("is_engines", "error"),
    [
        (False, DIED),
        (True, DIED.replace(b"500", b"400")),
        (True, DIED.replace(b"500", b'"rate_limit"')),
        (True, DIED.replace(b"data: {", b'data: {"choices": [], ')),
        (True, b'data: {"error": broken}\n\n'),
    ],
)
async def test_other_errors_reach_the_client_as_the_worker_wrote_them(is_engines: bool, error: bytes) -> None:
    async with with_worker(streams(ONE, error, DONE)) as (http, _):
        http.is_engines = is_engines
        assert await asked(http, []) == ONE + error + DONE
        assert http.watcher.heard[-1] == "end"


async def test_of_a_stream_that_is_too_long_nothing_is_kept() -> None:
    async with with_worker(cut_after(ONE, TWO)) as (http, _):
        http.kept_bytes = len(ONE)
        assert (await http.ask(post())).body.startswith(ONE + TWO)
        (kept,) = http.kept
        assert (kept.kept.is_overfull, kept.kept.events) == (True, b"")


@pytest.mark.parametrize("bytes_at_a_time", [1, 7, 1000])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_token_comments_are_kept_and_do_not_reach_the_client(version: bytes, bytes_at_a_time: int) -> None:
    events = [token_comment([at, at + 1]) + each for at, each in enumerate([ONE, TWO, THREE])]
    data = STREAM_HEAD + b"".join(map(chunked, [*events, DONE])) + b"0\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        for at in range(0, len(data), bytes_at_a_time):
            await exchange.send(data[at : at + bytes_at_a_time])
            await asyncio.sleep(0)

    async with with_worker(script) as (http, _):
        http.kept_bytes = KEPT
        assert (await http.ask(post().replace(b"HTTP/1.1", version))).body == ONE + TWO + THREE + DONE
        (kept,) = http.kept
        assert kept.kept.events.startswith(events[0])


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_events_behind_the_first_bytes_are_counted(end: bytes) -> None:
    first, *others = (each.replace(b"\n\n", end) for each in (ONE, TWO, THREE, DONE))
    has_begun = asyncio.Event()

    rest = b"".join(map(chunked, others)) + b"0\r\n\r\n"
    async with with_worker(in_two(has_begun, STREAM_HEAD + chunked(first), rest)) as (http, _):
        reader, _ = await http.dial(post())
        await reader.readuntil(end)
        has_begun.set()
        await reader.readuntil(b"0\r\n\r\n")
        assert (http.watcher.heard[-1], http.watcher.later_events) == ("end", 2)


async def test_a_client_that_leaves_between_two_workers_is_noticed() -> None:
    async with with_worker(cut_after(ONE)) as (http, _):
        http.kept_bytes = KEPT
        held = asyncio.Event()
        forward = http.forward
        http.at_cut = [b""]

        def hold(exchange: object, tries: int = 0) -> None:
            if http.watchers:
                held.set()
            else:
                forward(exchange, tries)  # type: ignore[arg-type]

        http.forward = hold  # type: ignore[method-assign]
        _, writer = await http.dial(post())
        await held.wait()
        writer.close()
        await until(lambda: bool(http.gone))


async def test_a_call_that_can_be_had_once_is_not_sent_twice() -> None:
    async def answer_and_close_the_next(exchange: Exchange) -> None:
        await exchange.answer(200, completion())
        await exchange.reader.readuntil(b"\r\n\r\n")
        await exchange.cut()

    async with with_worker(answer_and_close_the_next) as (http, worker):
        http.is_once = True
        for status in (200, 502):
            assert (await http.ask(post())).status == status
        assert http.watchers[-1].heard == ["failed first_byte: the connection closed before the answer's end"]
        assert len(worker.received) == 1


@pytest.mark.parametrize("begun", [b"", STREAM_HEAD], ids=["nothing came", "its head came"])
@pytest.mark.parametrize("is_once", [True, False])
async def test_a_call_that_can_be_had_once_is_left_only_when_its_answer_has_begun(is_once: bool, begun: bytes) -> None:
    asked_for, may_answer, was_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(begun)
        asked_for.set()
        await may_answer.wait()
        await exchange.send((STREAM_HEAD + chunked(ONE)).removeprefix(begun))
        await exchange.until_gone()
        was_left.set()

    async with with_worker(script) as (http, _):
        http.is_once = is_once
        _, writer = await http.dial(post())
        await asked_for.wait()
        heard = ["head 200"] if begun else []
        await until(lambda: http.watchers[0].heard == heard)
        writer.close()
        await until(lambda: http.watchers[0].heard == [*heard, "gone"])
        await http.ask(get())  # by now a connection that was to be closed is closed
        await until(lambda: len(http.plane.upstreams.connections) == int(is_once))
        may_answer.set()
        await was_left.wait()
        assert http.watcher.heard == [*heard, "gone"]


@pytest.mark.parametrize("head_first", [False, True])
async def test_a_left_call_whose_answer_ends_with_its_connection_has_one_end(head_first: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    asked_for, may_end, was_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(head if head_first else b"")
        asked_for.set()
        await may_end.wait()
        await exchange.send(b"" if head_first else head)
        await exchange.cut()
        was_left.set()

    async with with_worker(script) as (http, _):
        http.is_once = True
        _, writer = await http.dial(post())
        await asked_for.wait()
        await until(lambda: http.watchers[0].heard == ["head 200"] * head_first)
        writer.close()
        await until(lambda: http.watcher.heard[-1:] == ["gone"])
        may_end.set()
        await was_left.wait()
        await until(lambda: not http.plane.upstreams.connections)
        assert http.watcher.heard == [*["head 200"] * head_first, "gone"]


@pytest.mark.parametrize("cut_at", [5, len(TWO)])
async def test_tokens_behind_the_first_events_of_a_worker_that_goes_on_are_counted(cut_at: int) -> None:
    steps = [asyncio.Event(), asyncio.Event()]

    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(TWO[:cut_at]))
        await steps[0].wait()
        await exchange.send(chunked(TWO[cut_at:] + event("more")))
        await steps[1].wait()
        await exchange.send(b"".join(map(chunked, [token_comment([7, 8]) + THREE, DONE, b""])))

    async with with_worker(in_turn(cut_after(ONE), script)) as (http, _):
        http.kept_bytes, http.at_cut = KEPT, [b""]
        reader, _ = await http.dial(post())
        await until(lambda: len(http.watchers) > 1 and "first byte" in http.watchers[-1].heard)
        steps[0].set()
        await reader.readuntil(event("more"))
        steps[1].set()
        await reader.readuntil(DONE)
        await until(lambda: http.watchers[-1].heard[-1] == "end")
    assert http.kept[-1].later_tokens == 2
