"""A request's life as scripts: what its client, its destination and its call's answers do, and what came of it."""

import json
from typing import Any

import pytest

from kv_protocol.body_limits import Body
from kv_protocol.continuation import token_comment
from kv_protocol.decision import Exclusion
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.inbound import COMPLETIONS
from kv_protocol.openai.requests import decode_inbound
from router.decision.plan import first_plan
from router.http import refusals
from router.http.exchange import CallLimits, Exchange, HeaderLines, OutboundCall, ResponseHandler
from router.http.framing import KeptEvents
from router.http.heads import Headers
from router.http.refusals import Refusal, RequestRejected
from router.http.stream_replay import StreamReplayBuffer
from router.http.upstreams import UpstreamOrigin, UpstreamOrigins
from router.request.attempt import Attempt
from router.request.destination import Destination, RequestRecords
from router.request.request import Request
from router.request.route_request import route_request

STREAM: Headers = {b"content-type": b"text/event-stream"}
NO_ROOM = refusals.unavailable("the queue is full", "queue_full")
NO_WORKER = RequestRejected(
    refusals.unavailable("no worker", "no_eligible_worker"), (Exclusion(worker_id="w0", dp_rank=0, reason="draining"),)
)
HANDOFF = json.dumps(
    {"choices": [{"disaggregated_params": {"ctx_request_id": 7}, "finish_reason": "length", "index": 0}]}
).encode()


class Try(Attempt):
    """An attempt of a worker, whose answer may be passed on unless its status is 500 or more."""

    @property
    def may_be_passed_on(self) -> bool:
        return False

    def may_pass(self, status: int) -> bool:
        self.is_success = status < 400
        self.reason = f"status {status}" if status >= 500 else ""
        return not self.reason

    def refusal(self) -> Refusal:
        return refusals.worker_failed(self.rank.worker_id, self.reason)


class Life(Destination[Try], RequestRecords[Try]):
    """A request, its client and its destination in one: `facts` are what came of it, in order."""

    http_1_1 = is_bounded = True
    writing_paused = False
    origins = UpstreamOrigins()

    def __init__(self, *chosen: str | RequestRejected, phase: Any = "whole", retries: int = 1, migrations: int = 0,
                 waits: bool = False, fails: str = "", **body: Any) -> None:  # fmt: skip
        """`chosen`: workers' names in their order, or why there is none; `fails`: each call does, at once."""
        self.facts: list[str] = []
        self.written = b""
        self._chosen, self._waits, self._fails = list(chosen), waits, fails
        self._plan = first_plan(phase, retry_limit=retries, migration_limit=migrations)
        data = json.dumps({"model": "m", "prompt": "hello"} | body).encode()
        self.exchange = Exchange(self, "POST", COMPLETIONS, "", {}, data, 0.0)
        self.request = Request(self.exchange, self, self)
        self.request.run(self.request.live())

    def taken(self) -> list[str]:
        """Return the facts since the last call."""
        facts, self.facts = self.facts, []
        return facts

    # ------------------------------------------------------------------------------------------- as a destination

    async def read(self, request: Request[Try]) -> None:
        request.body = Body(request.exchange.body)
        request.inbound = decode_inbound(request.exchange.path, request.exchange.body)
        request.prompt = None
        request.route = route_request(lambda: "id", request.inbound, {}, Hashing(16))
        request.plan = self._plan

    def admits(self, request: Request[Try]) -> bool:
        del request
        return not self._waits

    def waited(self, request: Request[Try], refusal: Refusal | None) -> None:
        del request
        if refusal is not None:
            raise RequestRejected(refusal)

    def choose(self, request: Request[Try]) -> Try:
        del request
        chosen = self._chosen.pop(0) if self._chosen else NO_WORKER
        if isinstance(chosen, RequestRejected):
            raise chosen
        return Try(WorkerRank(chosen, 0))

    def call(self, request: Request[Try], attempt: Try) -> OutboundCall:
        state = f" behind {request.progress.token_count}" if request.progress is not None else ""
        state += f" with {request.handoff.params.decode()}" if request.handoff is not None else ""
        self.facts.append(f"{request.plan.phase} at {attempt.rank.worker_id}{state}")
        attempt.lines = f"by: {attempt.rank} after {request.prefilled_by}\r\n".encode()
        return OutboundCall("http://w", COMPLETIONS, b"", b"", CallLimits(1.0, 1.0, 1.0, 1.0))

    def fetching_call(self, request: Request[Try]) -> OutboundCall | None:
        del request
        self.facts.append("fetches")
        return None

    def replay_buffer(self, request: Request[Try]) -> StreamReplayBuffer:
        del request
        return StreamReplayBuffer(KeptEvents(1000))

    def unserved(self, request: Request[Try], exclusions: tuple[Exclusion, ...]) -> None:
        del request
        self.facts.append(f"unserved: {exclusions[0].reason}")

    def settle(self, request: Request[Try], attempt: Try, outcome: str) -> None:
        del request
        self.facts.append(f"{attempt.rank.worker_id} {outcome}")

    def ended(self, request: Request[Try], outcome: str, refusal: Refusal | None) -> None:
        why = "" if refusal is None else f": {refusal.message}"
        self.facts.append(f"over {outcome}{why}{'' if request.stream_loss is None else ', ' + request.stream_loss}")

    # ------------------------------------------------------------------------------------------- as a client

    @property
    def outward(self) -> Any:
        return self

    def dial(self, origin: UpstreamOrigin, exchange: Exchange, call: OutboundCall, handler: ResponseHandler) -> None:
        del origin, call
        self._asked = exchange
        if self._fails:
            handler.on_failed("connect", self._fails, False)

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        del body, content_type, headers
        self.facts.append(f"answered {status}")

    def write(self, data: bytes) -> None:
        self.written += data

    def finish(self) -> None:
        self.facts.append("stream ended")

    def cut(self) -> None:
        raise AssertionError("answers of the router are complete")

    # ------------------------------------------------------------------------------------------- what workers do

    def begins(self, status: int = 200, headers: Headers = STREAM) -> bytes | None:
        """Let the present worker's answer begin."""
        lines = self.request.on_head(status, headers, headers is STREAM)
        if lines is None:
            self.request.on_dropped()
        else:
            self.request.on_first_byte()
        return lines

    def streams(self, ids: list[int], reason: str | None = None) -> None:
        """Let the present worker's stream have these tokens."""
        event = {"id": "a", "created": 1, "choices": [{"finish_reason": reason}]}
        buffer = self.request.replay_buffer
        assert buffer is not None
        buffer.add(token_comment(ids) + b"data: %b\n\n" % json.dumps(event).encode())

    def is_cut(self) -> bytes | None:
        """Let the present worker fail in the midst of its stream."""
        self.exchange.has_begun = self.exchange.is_stream = True
        return self.request.on_cut("body", "cut")

    def collects(self, body: bytes) -> None:
        """Let the present worker, a prefill one, answer."""
        self.begins(headers={})
        assert self._asked.client is not None
        self._asked.client.write(b"\r\n\r\n" + body)
        self.request.on_end(b"", 0)


def test_a_request_is_decided_sent_relayed_and_settled() -> None:
    life = Life("w0")
    assert life.taken() == ["whole at w0"]
    assert life.begins() == b"by: w0/0 after None\r\n"
    life.request.on_end(b'"usage": {"prompt_tokens": 9, "completion_tokens": 4}', 3)
    assert life.taken() == ["w0 ok", "over ok"]
    assert (life.request.attempts[0].answer.output_tokens, life.request.attempts[0].answer.later_tokens) == (4, 3)
    life.request.on_failed("body", "cut", True)
    life.exchange.leave()
    assert life.taken() == [], "nothing follows"


def test_what_cannot_be_read_or_queued_is_refused() -> None:
    assert Life(model=3).facts[1:] == ["answered 400"]
    life = Life("w0", waits=True)
    assert life.facts == []
    life.request.resume(NO_ROOM)
    assert life.facts == ["over failed: the queue is full", "answered 503"]


def test_a_request_that_waited_is_sent_in_the_turn_in_which_it_is_admitted() -> None:
    life = Life("w0", waits=True)
    life.request.resume()
    assert life.facts == ["whole at w0"]


def test_without_an_eligible_worker_another_phase_is_tried_then_the_request_is_refused() -> None:
    assert Life(NO_WORKER, "w0", phase="prefill").facts == ["alone at w0"]
    refused = ["unserved: draining", "over failed: no worker", "answered 503"]
    assert Life(NO_WORKER, NO_WORKER, phase="prefill").facts == refused
    final = RequestRejected(NO_WORKER.refusal)
    assert Life(final, "w0", phase="prefill").facts == refused[1:], "a final no tries no other phase"


def test_a_worker_that_fails_before_its_answer_is_followed_by_another_until_retries_are_used_up() -> None:
    life = Life("w0", "w1", "w2")
    life.request.on_failed("connect", "refused", False)
    assert life.taken() == ["whole at w0", "w0 failed", "whole at w1"]
    assert life.begins(500) is None
    assert life.taken() == ["w1 failed", "over failed: worker w1 failed: status 500", "answered 502"]
    assert [each.is_retried for each in life.request.attempts] == [True, False]


def test_a_call_may_fail_before_it_is_sent() -> None:
    life = Life("w0", "w1", fails="no socket")
    assert life.facts[:4] == ["whole at w0", "w0 failed", "whole at w1", "w1 failed"]
    assert life.facts[4:] == ["over failed: worker w1 failed: no socket", "answered 502"]


def test_when_no_other_worker_is_left_the_last_ones_failure_is_the_error() -> None:
    life = Life("w0")
    life.request.on_failed("first_byte", "too slow", False)
    assert life.taken()[-2:] == ["over failed: worker w0 failed: too slow", "answered 502"]


def test_a_limit_of_the_router_is_not_retried() -> None:
    life = Life("w0", "w1")
    life.request.on_failed("local", "no socket", False)
    assert life.facts[1:] == ["w0 failed", "over failed: no socket", "answered 503"]
    assert life.request.attempts[0].stage == "local"


def test_an_answer_that_fails_after_it_began_ends_the_request() -> None:
    life = Life("w0", "w1")
    life.begins()
    life.request.on_failed("body", "cut", True)
    assert life.facts[1:] == ["w0 failed", "over failed, not_resumable"]


async def test_a_prompt_is_prefilled_at_one_worker_and_decoded_at_another() -> None:
    life = Life("w0", "w1", phase="prefill")
    life.collects(HANDOFF)
    handoff = '{"ctx_request_id":7,"request_type":"generation_only"}'
    assert life.facts == ["prefill at w0", "w0 ok", f"decode at w1 with {handoff}"]
    assert life.begins() == b"by: w1/0 after w0/0\r\n"


async def test_a_prefill_answer_that_is_whole_is_the_clients_and_one_that_is_unusable_is_asked_elsewhere() -> None:
    life = Life("w0", "w1", phase="prefill")
    life.collects(b"{}")
    life.collects(b'{"choices": [{"finish_reason": "stop", "index": 0}]}')
    assert life.facts == ["prefill at w0", "w0 failed", "prefill at w1", "w1 ok", "over ok", "answered 200"]


async def test_when_the_client_leaves_between_prefill_and_decode_the_kv_is_fetched_all_the_same() -> None:
    class Paused(Life):
        def pause_s(self, request: Request[Try], retry: int) -> float:
            del request, retry
            return 10.0

    life = Paused("w0", "w1", phase="prefill")
    life.collects(HANDOFF)
    life.request.on_failed("connect", "refused", False)
    life.taken()
    life.exchange.leave()
    assert life.facts == ["over cancelled", "fetches"]


def test_a_cut_stream_resumes_behind_its_tokens_as_often_as_it_may() -> None:
    life = Life("w0", "w1", migrations=1, stream=True, max_tokens=9)
    life.begins()
    life.streams([5, 6])
    assert life.is_cut() == b""
    assert life.taken() == ["whole at w0", "w0 failed", "whole at w1 behind 2"]
    assert life.request.plan.reroutes == ("migrated",)
    life.begins()
    life.streams([7])
    assert life.is_cut() is None


def test_an_error_in_answer_to_a_resumed_stream_is_not_the_clients() -> None:
    life = Life("w0", "w1", retries=0, migrations=1, stream=True)
    life.begins()
    life.streams([5])
    life.is_cut()
    life.taken()
    assert life.begins(404, {}) is None
    why = "worker w1 failed: status 404 to an answer that was to go on"
    assert life.facts == ["w1 failed", f"over failed: {why}, no_worker", "stream ended"]


def test_a_cut_stream_that_lacks_only_its_end_is_ended() -> None:
    life = Life("w0", "w1", migrations=1, stream=True, max_tokens=2)
    life.begins()
    life.streams([5, 6], "length")
    ending = life.is_cut()
    assert ending is not None
    assert ending.endswith(b"data: [DONE]\n\n")
    assert life.facts[1:] == ["w0 failed", "over ok"]


@pytest.mark.parametrize("migrations", [0, 1])
def test_a_cut_stream_whose_tokens_are_unknown_does_not_resume(migrations: int) -> None:
    life = Life("w0", "w1", migrations=migrations, stream=True)
    life.begins()
    assert life.is_cut() is None
    assert life.facts == ["whole at w0"]


def test_a_client_may_leave_before_anything_is_sent_and_within_the_answer() -> None:
    life = Life("w0", waits=True)
    life.exchange.leave()
    life.request.resume()
    assert life.facts == ["over cancelled"]
    life = Life("w0")
    life.begins()
    life.request.on_gone(0)
    assert life.facts[1:] == ["w0 cancelled", "over cancelled"]
