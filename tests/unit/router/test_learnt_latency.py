"""What is learnt and shown of when an answer's tokens came: the router's whole data plane, in virtual time."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from kv_protocol.continuation import Continuation, token_comment
from kv_protocol.decode_time import DECODE_HEADER
from router.decision.policy import Policy
from router.pools.config import LiveLimits
from router.pools.state import ProbeResult
from router.pools.watch import busyness
from tests.support.amount import examples
from tests.unit.router.plane import Plane, running_plane
from tests.unit.router.role_workers import RoleWorker
from tests.unit.router.upstream import DONE, Exchange, Upstream, chunked, event

TTFT_S, ITL_S, TOKENS = 0.02, 0.01, 21
DECODE_S = (TOKENS - 1) * ITL_S
PREDICTED = "predicted-ttft"
MODES = [PREDICTED, "kv"]
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
USAGE = {"usage": {"prompt_tokens": 64, "completion_tokens": TOKENS}}


def named_event(text: str) -> bytes:
    """Return an event with which another worker can go on."""
    return event(text).replace(b"{", b'{"id": "cmpl", "created": 7, ', 1)


class TimedWorker:
    """Answers with `TOKENS` tokens: the first after `TTFT_S`, each other one `ITL_S` later, in virtual time.

    One of ours tells when its tokens came. A stream waits for the client after each event: `heard` says so.
    """

    def __init__(self, plane: Plane, *, is_ours: bool, tokens_per_event: int) -> None:
        self._clock, self._is_ours, self._tokens_per_event = plane.clock, is_ours, tokens_per_event
        self.heard = asyncio.Semaphore(0)
        self.cut_after: int | None = None
        """After so many tokens the next stream is cut."""

    async def __call__(self, exchange: Exchange) -> None:
        body = json.loads(exchange.received.body)
        await self._clock.advance(TTFT_S)
        if not body.get("stream"):
            await self._clock.advance(DECODE_S)
            said: dict[str, Any] = {DECODE_HEADER: f"{DECODE_S * 1e3:.3f}"} if self._is_ours else {}
            await exchange.answer(body=json.dumps({"choices": [{"text": "words"}], **USAGE}).encode(), **said)
            return
        await exchange.head(transfer_encoding="chunked")
        has_comments = self._is_ours and "x-kv-continuable" in exchange.received.headers
        step, cut_after, self.cut_after = self._tokens_per_event, self.cut_after, None
        before = len(Continuation(**body["kv_continue"]).token_ids()) if "kv_continue" in body else 0
        for at in range(before, TOKENS, step):
            tokens = list(range(at, min(TOKENS, at + step)))
            if at > before:
                await self._clock.advance(len(tokens) * ITL_S)
            await exchange.send(chunked((token_comment(tokens) if has_comments else b"") + named_event(str(at))))
            await self.heard.acquire()
            if cut_after is not None and at + step >= cut_after:
                await exchange.cut()
                return
        usage = b"data: " + json.dumps({"choices": [], **USAGE}).encode() + b"\n\n"
        await exchange.send(chunked((usage if "stream_options" in body else b"") + DONE) + b"0\r\n\r\n")


class Fleet(NamedTuple):
    """A router before one worker, and what it has learnt and shows."""

    plane: Plane
    worker: TimedWorker

    async def whole(self) -> None:
        """Ask for an unstreamed answer."""
        self.plane.hear("w0")
        await self.plane.post()

    async def stream(self, headers: bytes = b"", **changed: Any) -> bytes:
        """Ask for a stream; return its events as the client got them."""
        self.plane.hear("w0")
        reader, _ = await self.plane.dial({"stream": True} | changed, headers=headers)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        events, found = b"", b""
        while not found.endswith(DONE):
            found = await reader.readuntil(b"\n\n")
            events += found.partition(b"\r\n")[2] if b"\r\n" in found else found
            if b'"text"' in found:
                self.worker.heard.release()
        return events

    async def predicted(self) -> tuple[float, float]:
        """Return what is predicted of the usual prompt: seconds to the first token, and between tokens."""
        (candidate,) = json.loads((await self.plane.post(path="/v1/route")).body)["decision"]["candidates"]
        return candidate["predicted_ttft_s"], candidate["predicted_itl_s"]

    def shown(self, name: str) -> tuple[float, float]:
        """Return how many answers a histogram has, and their mean."""
        mode = self.plane.routing.policy.mode
        count = self.plane.metric(f"{name}_seconds_count", mode=mode)
        return count, self.plane.metric(f"{name}_seconds_sum", mode=mode) / count if count else 0.0

    def seen_by_pools(self) -> ProbeResult:
        """Return what `router pools` reads of this router: answers within 50 ms, and with 50 ms between tokens."""
        return busyness(generate_latest(self.plane.registry), LiveLimits(ttft_bound_ms=50, itl_bound_ms=50))


@asynccontextmanager
async def fleet(*, is_ours: bool = False, tokens_per_event: int = 1, **policy: Any) -> AsyncIterator[Fleet]:
    async with running_plane(policy=Policy(**{"mode": PREDICTED} | policy)) as plane:
        worker = TimedWorker(plane, is_ours=is_ours, tokens_per_event=tokens_per_event)
        async with Upstream(worker) as upstream:
            plane.join("w0", upstream.base_url)
            yield Fleet(plane, worker)


# ---------------------------------------------------------------- answers that come whole


async def test_how_long_an_unstreamed_answer_took_says_nothing_of_its_first_token() -> None:
    async with fleet() as found:
        before = await found.predicted()
        for _ in range(40):
            await found.whole()
        assert await found.predicted() == before
        assert found.shown("time_to_first_token") == found.shown("inter_token_latency") == (0, 0)
        assert found.plane.metric("request_duration_seconds_count", mode=PREDICTED) == 40
        seen = found.seen_by_pools()
        assert (seen.attained["ttft"].total, seen.attained["itl"].total) == (0, 0)


async def test_unstreamed_answers_do_not_have_requests_refused_whose_target_is_met() -> None:
    async with fleet(unmet="reject", ttft_target_s=0.1) as found:
        for _ in range(40):
            await found.whole()
        assert found.plane.outcomes() == {"ok": 40}


async def test_an_agent_says_when_the_tokens_of_an_unstreamed_answer_came() -> None:
    async with fleet(is_ours=True) as found:
        answered = await found.plane.post()
        assert DECODE_HEADER not in answered.headers
        outcome = found.plane.outcome(answered.headers["x-decision-id"])
        assert outcome.ttft_s == pytest.approx(TTFT_S)
        assert outcome.itl_s == pytest.approx(ITL_S)
        assert found.shown("time_to_first_token") == pytest.approx((1, TTFT_S))
        assert found.shown("inter_token_latency") == pytest.approx((1, ITL_S))


async def test_whole_or_streamed_an_agents_answers_teach_the_same() -> None:
    learnt = []
    for is_streamed in (True, False):
        async with fleet(is_ours=True) as found:
            for _ in range(10):
                await (found.stream() if is_streamed else found.whole())
            learnt.append(await found.predicted())
    assert learnt[0] == pytest.approx(learnt[1], rel=1e-3)


@settings(max_examples=examples(15))
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_unstreamed_answers_among_streams_do_not_change_what_is_learnt(are_streamed: Sequence[bool]) -> None:
    async def learnt(*, has_whole: bool) -> tuple[Any, ...]:
        async with fleet() as found:
            for is_streamed in are_streamed:
                if is_streamed:
                    await found.stream()
                elif has_whole:
                    await found.whole()
            shown = [found.shown(name) for name in ("time_to_first_token", "inter_token_latency")]
            return (*await found.predicted(), *shown[0], *shown[1])

    alone, mixed = (asyncio.run(learnt(has_whole=has_whole)) for has_whole in (False, True))
    assert mixed == pytest.approx(alone)


@pytest.mark.parametrize("said", ["-1", "nan", "1e9", "", "250000"])
async def test_a_decode_time_that_cannot_be_is_not_believed(said: str) -> None:
    said_by_worker: dict[str, Any] = {DECODE_HEADER: said}

    async def script(exchange: Exchange) -> None:
        await found.plane.clock.advance(DECODE_S)
        await exchange.answer(body=json.dumps({"choices": [], **USAGE}).encode(), **said_by_worker)

    async with fleet() as found, Upstream(script) as upstream:
        found.plane.leave("w0")
        found.plane.join("w1", upstream.base_url)
        outcome = found.plane.outcome((await found.plane.post()).headers["x-decision-id"])
    assert (outcome.ttft_s, outcome.itl_s) == (None, None)


async def test_a_prefill_workers_answer_is_its_first_token() -> None:
    async with running_plane(policy=Policy(mode=PREDICTED)) as plane:

        async def late() -> None:
            await plane.clock.advance(TTFT_S)

        prefill, decode = RoleWorker("prefill"), RoleWorker("decode")
        prefill.waits = late
        async with Upstream(prefill) as one, Upstream(decode) as other:
            plane.join("p0", one.base_url, role="prefill")
            plane.join("d0", other.base_url, role="decode")
            await plane.post({"max_tokens": 6})
    newest = [record.outcome for record in plane.routing.decisions.newest(2)]
    decoded, prefilled = [(each.ttft_s, each.itl_s) for each in newest if each is not None]
    assert decoded == (None, None)
    assert prefilled[0] == pytest.approx(TTFT_S)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("options", [{}, WITH_USAGE])
async def test_a_stream_shows_when_its_tokens_came_with_usage_or_without(*, is_ours: bool, options: Any) -> None:
    async with fleet(is_ours=is_ours) as found:
        await found.stream(**options)
        assert found.shown("time_to_first_token") == pytest.approx((1, TTFT_S))
        assert found.shown("inter_token_latency") == pytest.approx((1, ITL_S))


@pytest.mark.parametrize(
    ("is_ours", "options", "itl_s"), [(True, {}, ITL_S), (False, WITH_USAGE, ITL_S), (False, {}, 4 * ITL_S)]
)
async def test_of_several_tokens_an_event_the_time_between_events_is_a_bound(
    *, is_ours: bool, options: Any, itl_s: float
) -> None:
    async with fleet(is_ours=is_ours, tokens_per_event=4) as found:
        await found.stream(**options)
        count, mean_s = found.shown("inter_token_latency")
        assert count == 1
        assert mean_s == pytest.approx(itl_s, rel=0.25)


async def test_of_a_stream_that_comes_at_once_nothing_is_known_between_its_tokens() -> None:
    async with fleet(is_ours=True, tokens_per_event=TOKENS) as found:
        await found.stream(**WITH_USAGE)
        assert found.shown("time_to_first_token")[0] == 1
        assert found.shown("inter_token_latency") == (0, 0)


@pytest.mark.parametrize("options", [{}, WITH_USAGE])
async def test_a_stream_that_went_on_elsewhere_is_measured_by_the_tokens_of_each_worker(
    options: dict[str, Any],
) -> None:
    async with fleet(is_ours=True) as found:
        worker = found.plane.state.fleet.worker("w0")
        assert worker is not None
        found.plane.join("w1", worker.registration.base_url)
        found.worker.cut_after = 15
        events = await found.stream(**options)
        assert events.count(b'"text"') == TOKENS
        assert found.shown("time_to_first_token") == pytest.approx((1, TTFT_S))
        assert found.shown("inter_token_latency") == pytest.approx((1, ITL_S))


async def test_of_several_choices_side_by_side_nothing_is_known_between_tokens() -> None:
    async with fleet() as found:
        await found.stream(n=2, **WITH_USAGE)
        assert found.shown("inter_token_latency") == (0, 0)


# ---------------------------------------------------------------- token comments


async def test_token_comments_reach_a_client_that_wants_them_and_no_other() -> None:
    async with fleet(is_ours=True) as found:
        plain = await found.stream()
        wanted = await found.stream(b"x-kv-continuable: 1\r\n")
    assert b": tokens" not in plain
    assert wanted.count(b": tokens") == TOKENS
    assert plain.count(b"data: ") == wanted.count(b"data: ") == TOKENS + 1
