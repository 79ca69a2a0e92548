"""A request's life as scripts: events in, commands out, no I/O."""

import json
from typing import Any

import pytest

from kv_protocol.continuation import token_comment
from kv_protocol.decision import Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.requests import Inbound, decode_inbound
from router.request import refusals
from router.request.attempt import Attempt
from router.request.events import (
    Admitted,
    AnswerBegan,
    AnswerDropped,
    Answered,
    AnswerEnded,
    AttemptOver,
    CallFailed,
    Chosen,
    ClientLeft,
    Command,
    Decide,
    Drop,
    Event,
    FinishStream,
    FirstByteCame,
    GiveUp,
    HeadCame,
    MakeRoute,
    NotChosen,
    Parsed,
    Queue,
    Record,
    Refuse,
    Refused,
    Relay,
    Reply,
    RequestOver,
    Rerouted,
    Retried,
    Retry,
    Send,
    StreamCut,
    StreamLost,
    Unserved,
)
from router.request.machine import RequestMachine
from router.request.plan import RequestPlan
from router.request.refusals import Refusal
from router.request.usage import NO_USAGE, Usage

STREAM = {b"content-type": b"text/event-stream"}
USAGE = b'"usage": {"prompt_tokens": 9, "completion_tokens": 4}'
NO_ROOM = refusals.unavailable("the queue is full", "queue_full")
NO_WORKER = refusals.unavailable("no worker", "no_eligible_worker")
NONE_ELIGIBLE = (Exclusion(worker_id="w0", dp_rank=0, reason="draining"),)
HANDOFF = {"disaggregated_params": {"ctx_request_id": 7}, "finish_reason": "length", "index": 0}


class Try(Attempt):
    """An attempt of a worker, whose answer may be passed on unless its status is 500 or more."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def rank(self) -> WorkerRank:
        return WorkerRank(self.name, 0)

    def _may_pass(self, headers: Any) -> bool:
        del headers
        self.reason = f"status {self.status}" if self.status >= 500 else ""
        return not self.reason

    def refusal(self) -> Refusal:
        return refusals.worker_failed(self.name, self.reason)


def inbound(**body: Any) -> Inbound:
    return decode_inbound("/v1/completions", json.dumps({"model": "m", "prompt": "hello"} | body).encode())


def parsed(phase: Any = "whole", *, retry_limit: int = 1, migration_limit: int = 0, **body: Any) -> Parsed:
    plan = RequestPlan(phase, retry_limit=retry_limit, migration_limit=migration_limit)
    return Parsed(plan, inbound(**body), isl_tokens=9)


def after(*events: Event) -> RequestMachine:
    """Return a machine that has received these events."""
    machine = RequestMachine()
    for event in events:
        machine.receive(event)
    return machine


def send(attempt: Attempt, **changed: Any) -> Send:
    fields = {"is_aside": False, "keeps_events": False, "handoff": None, "progress": None}
    return Send(attempt, **fields | changed)


def over(attempt: Attempt, outcome: Any = "failed") -> Record:
    return AttemptOver(attempt, outcome)


def ended(outcome: Any, refusal: Refusal | None = None) -> Record:
    return RequestOver(outcome, refusal)


def test_a_request_is_queued_decided_sent_relayed_and_settled() -> None:
    machine, w0 = RequestMachine(), Try("w0")
    script: list[tuple[Event, tuple[Command, ...]]] = [
        (parsed(), (Queue(),)),
        (Admitted(), (Decide(),)),
        (Chosen(w0), (send(w0),)),
        (HeadCame(200, STREAM), (Relay(w0, None, is_aside=False),)),
        (FirstByteCame(), (AnswerBegan(w0, is_first_token=True),)),
        (
            AnswerEnded(USAGE, 3),
            (
                AttemptOver(w0, "ok", Usage(4, None, 9), came_whole=False, later_tokens=3),
                Answered(w0, Usage(4, None, 9), is_first_token=False),
                ended("ok"),
            ),
        ),
    ]
    for event, commands in script:
        assert machine.receive(event) == commands
    assert machine.is_over


@pytest.mark.parametrize("event", [parsed(), Admitted(), CallFailed("body", "cut", has_begun=True), ClientLeft()])
def test_after_the_end_nothing_follows(event: Event) -> None:
    machine = after(parsed(), ClientLeft())
    assert machine.receive(event) == ()


def test_what_cannot_be_read_or_queued_is_refused() -> None:
    assert RequestMachine().receive(Refused(NO_ROOM)) == (ended("failed", NO_ROOM), Refuse(NO_ROOM))
    assert after(parsed()).receive(Refused(NO_ROOM)) == (ended("failed", NO_ROOM), Refuse(NO_ROOM))


def test_without_an_eligible_worker_another_phase_is_tried_then_the_request_is_refused() -> None:
    machine = after(parsed("prefill"), Admitted())
    assert machine.receive(NotChosen(NO_WORKER, NONE_ELIGIBLE)) == (
        Rerouted("no_prefill_worker"),
        MakeRoute(),
        Decide(),
    )
    assert machine.receive(NotChosen(NO_WORKER, NONE_ELIGIBLE)) == (
        Unserved(NONE_ELIGIBLE),
        ended("failed", NO_WORKER),
        Refuse(NO_WORKER),
    )


def test_a_final_no_tries_no_other_phase() -> None:
    machine = after(parsed("prefill"), Admitted())
    assert machine.receive(NotChosen(NO_WORKER, None)) == (ended("failed", NO_WORKER), Refuse(NO_WORKER))


def test_a_worker_that_fails_before_its_answer_is_followed_by_another_until_retries_are_used_up() -> None:
    machine, w0, w1 = after(parsed(retry_limit=1), Admitted()), Try("w0"), Try("w1")
    machine.receive(Chosen(w0))
    assert machine.receive(CallFailed("connect", "refused", has_begun=False)) == (over(w0), MakeRoute(), Retry(1))
    assert machine.receive(Chosen(w1)) == (Retried("connect"), send(w1))
    assert machine.receive(HeadCame(500, {})) == (Drop(),)
    refusal = refusals.worker_failed("w1", "status 500")
    assert machine.receive(AnswerDropped()) == (over(w1), ended("failed", refusal), Refuse(refusal))


def test_when_no_other_worker_is_left_the_last_ones_failure_is_the_error() -> None:
    machine = after(parsed(), Admitted(), Chosen(Try("w0")), CallFailed("first_byte", "too slow", has_begun=False))
    refusal = refusals.worker_failed("w0", "too slow")
    assert machine.receive(NotChosen(NO_WORKER, NONE_ELIGIBLE))[-1] == Refuse(refusal)


def test_a_limit_of_the_router_is_not_retried() -> None:
    machine, w0 = after(parsed(), Admitted()), Try("w0")
    machine.receive(Chosen(w0))
    assert machine.receive(CallFailed("local", "no socket", has_begun=False))[0] == over(w0)
    assert (machine.is_over, w0.phase) == (True, "local")


def test_an_answer_that_fails_after_it_began_ends_the_request() -> None:
    machine, w0 = after(parsed(), Admitted()), Try("w0")
    machine.receive(Chosen(w0))
    machine.receive(HeadCame(200, STREAM))
    machine.receive(FirstByteCame())
    assert machine.receive(CallFailed("body", "cut", has_begun=True)) == (
        over(w0),
        StreamLost("not_resumable"),
        ended("failed"),
    )


def test_a_prompt_is_prefilled_at_one_worker_and_decoded_at_another() -> None:
    machine, w0, w1 = RequestMachine(), Try("w0"), Try("w1")
    assert machine.receive(parsed("prefill")) == (MakeRoute(), Queue())
    machine.receive(Admitted())
    assert machine.receive(Chosen(w0)) == (send(w0, is_aside=True),)
    assert machine.receive(HeadCame(200, {})) == (Relay(w0, None, is_aside=True),)
    collected = AnswerEnded(json.dumps({"choices": [HANDOFF]}).encode(), 0)
    settled = AttemptOver(w0, "ok", NO_USAGE, later_tokens=0)
    assert machine.receive(collected) == (settled, MakeRoute(), Decide())
    (sent,) = machine.receive(Chosen(w1))
    assert isinstance(sent, Send)
    assert sent.handoff is not None
    assert json.loads(sent.handoff.params) == {"ctx_request_id": 7, "request_type": "generation_only"}
    assert machine.receive(HeadCame(200, STREAM)) == (Relay(w1, w0, is_aside=False),)


def test_a_prefill_answer_that_is_whole_is_the_clients() -> None:
    machine, w0 = after(parsed("prefill"), Admitted()), Try("w0")
    machine.receive(Chosen(w0))
    machine.receive(HeadCame(200, {}))
    body = json.dumps({"choices": [{"finish_reason": "stop", "index": 0}]}).encode()
    *_, last, reply = machine.receive(AnswerEnded(body, 0))
    assert (last, isinstance(reply, Reply)) == (ended("ok"), True)


def test_when_the_client_leaves_between_prefill_and_decode_the_kv_is_fetched_all_the_same() -> None:
    machine, w0 = after(parsed("prefill"), Admitted()), Try("w0")
    machine.receive(Chosen(w0))
    machine.receive(AnswerEnded(json.dumps({"choices": [HANDOFF]}).encode(), 0))
    ending, give_up = machine.receive(ClientLeft())
    assert ending == ended("cancelled")
    assert isinstance(give_up, GiveUp)
    assert give_up.handoff is not None


def test_a_cut_stream_resumes_behind_its_tokens() -> None:
    machine, w0, w1 = after(parsed(migration_limit=1, stream=True, max_tokens=9), Admitted()), Try("w0"), Try("w1")
    assert machine.receive(Chosen(w0)) == (send(w0, keeps_events=True),)
    machine.receive(HeadCame(200, STREAM))
    machine.receive(FirstByteCame())
    events = token_comment([5, 6]) + b'data: {"id":"a","created":1,"choices":[{"finish_reason":null}]}\n\n'
    assert machine.may_move(events, None, begun=True)
    assert machine.receive(StreamCut("body", "cut", events)) == (
        over(w0),
        Rerouted("migrated"),
        FinishStream(b""),
        MakeRoute(),
        Retry(1),
    )
    (sent,) = machine.receive(Chosen(w1))
    assert isinstance(sent, Send)
    assert sent.progress is not None
    assert (sent.progress.token_count, sent.keeps_events) == (2, True)
    assert machine.may_move(b"", None, begun=True), "the next worker gave no byte: another may be tried"
    machine.receive(HeadCame(200, STREAM))
    machine.receive(FirstByteCame())
    assert not machine.may_move(events, None, begun=True), "the limit of migrations is reached"


def test_an_error_in_answer_to_a_resumed_stream_is_not_the_clients() -> None:
    machine = after(parsed(migration_limit=1, retry_limit=0, stream=True), Admitted(), Chosen(Try("w0")))
    machine.receive(HeadCame(200, STREAM))
    machine.receive(FirstByteCame())
    events = token_comment([5]) + b'data: {"id":"a","created":1,"choices":[{"finish_reason":null}]}\n\n'
    machine.receive(StreamCut("body", "cut", events))
    w1 = Try("w1")
    machine.receive(Chosen(w1))
    assert machine.receive(HeadCame(404, {})) == (Drop(),)
    refusal = refusals.worker_failed("w1", "status 404 to an answer that was to go on")
    lost = StreamLost("no_worker")
    assert machine.receive(AnswerDropped()) == (over(w1), lost, ended(refusal.outcome, refusal), Refuse(refusal))


def test_a_cut_stream_that_lacks_only_its_end_is_ended() -> None:
    machine, w0 = after(parsed(migration_limit=1, stream=True, max_tokens=2), Admitted()), Try("w0")
    machine.receive(Chosen(w0))
    machine.receive(HeadCame(200, STREAM))
    machine.receive(FirstByteCame())
    events = token_comment([5, 6]) + b'data: {"id":"a","created":1,"choices":[{"finish_reason":"length"}]}\n\n'
    first, second, finish = machine.receive(StreamCut("body", "cut", events))
    assert (first, second) == (over(w0), ended("ok"))
    assert isinstance(finish, FinishStream)
    assert finish.events.endswith(b"data: [DONE]\n\n")


def test_a_cut_stream_without_kept_events_does_not_resume() -> None:
    machine = after(parsed(migration_limit=1, stream=True), Admitted(), Chosen(Try("w0")), HeadCame(200, STREAM))
    machine.receive(FirstByteCame())
    assert not machine.may_move(None, None, begun=True)
    assert not machine.may_move(b"data: {}\n\n", None, begun=True), "the worker told no ids"
    assert machine.receive(StreamCut("body", "cut", None)) == ()
    assert not machine.is_over


@pytest.mark.parametrize("events", [(), (parsed(),), (parsed(), Admitted())])
def test_a_client_may_leave_before_anything_is_sent(events: tuple[Event, ...]) -> None:
    assert after(*events).receive(ClientLeft()) == (ended("cancelled"),)


def test_a_client_may_leave_within_the_answer() -> None:
    machine, w0 = after(parsed(), Admitted()), Try("w0")
    machine.receive(Chosen(w0))
    machine.receive(HeadCame(200, STREAM))
    assert machine.receive(ClientLeft()) == (over(w0, "cancelled"), ended("cancelled"))
