"""The life of one request as a state machine without I/O: `receive` takes an event and returns commands.

    Parsed ─> Queue ─> Admitted ─> Decide ─> Chosen ─> Send ─> HeadCame ─> Relay ─> FirstByteCame ─> AnswerEnded

| where | may go wrong | then |
|---|---|---|
| read, prompt | the client's fault | 4xx that names the field |
| queue | too much waits, or it waits too long | 429 or 503 with `Retry-After` |
| decide | no worker is eligible | another phase of the plan; else 503 or 400 with every rank's reason |
| sent | a worker fails before its answer, or is busy | another worker as the plan says; then 502, 503 |
| | it fails later | the stream resumes on another worker, or ends with an error event |
| anywhere | the client leaves | its resources are released at once |

A prefill worker's answer is collected, and its handoff sent to a decode worker (`plan.py`). Commands are carried out in
their order by the driver (`driver.py`); only the last of them may lead to another event.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_protocol.continuation import Progress, progress_of
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.inbound import CHAT
from kv_protocol.openai.requests import Inbound
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
    Refuse,
    Refused,
    Relay,
    Reply,
    RequestOver,
    Rerouted,
    ResumeFailed,
    Retried,
    Retry,
    Send,
    ServedElsewhere,
    StreamCut,
    StreamLost,
    Unserved,
)
from router.request.handoff import AnswerUnusable, PrefillAnswer, as_events, prefill_answer
from router.request.plan import Phases
from router.request.refusals import Refusal
from router.request.usage import NO_USAGE, Usage, usage_in

if TYPE_CHECKING:
    from router.request.events import StreamLoss
    from router.server.exchange import UpstreamStage

_USAGE_BYTES = 4096
Commands = tuple[Command, ...]
_NOTHING: Commands = ()
_QUEUE: Commands = (Queue(),)
_DECIDE: Commands = (Decide(),)
_GO_ON: Commands = (MakeRoute(), Decide())


class RequestMachine:
    """One request. After its end, events change nothing."""

    __slots__ = (
        "_failed",
        "_handoff",
        "_has_asides",
        "_inbound",
        "_is_resumed",
        "_isl_tokens",
        "_prefilled_by",
        "_progress",
        "_retried",
        "attempt",
        "is_over",
        "plan",
    )

    _inbound: Inbound
    _isl_tokens: int

    def __init__(self) -> None:
        self.plan: Phases | None = None
        """None until the request is parsed."""
        self.is_over = False
        self.attempt: Attempt | None = None
        """The present attempt; None while no worker has the request."""
        self._failed: Attempt | None = None
        self._retried: UpstreamStage | None = None
        self._handoff: PrefillAnswer | None = None
        self._prefilled_by: Attempt | None = None
        self._progress: Progress | None = None
        self._has_asides = False
        """Whether an answer was collected, or is."""
        self._is_resumed = False
        """Whether the client has the beginning of a stream that another worker is to continue."""

    @property
    def is_collecting(self) -> bool:
        """Whether a worker's answer is being collected, or is about to be."""
        return self.plan is not None and self.plan.is_aside and not self.is_over

    def may_move(self, events: bytes | None, before: Progress | None, *, begun: bool) -> bool:
        """Return whether the request goes on at another worker if its own fails now.

        `events` and `before` are those of `StreamCut`; `begun`: the client has part of the answer.
        """
        attempt, plan = self.attempt, self.plan
        if attempt is None or plan is None:
            return False
        if not begun or (self._is_resumed and not attempt.has_begun and events is not None):
            return plan.may_fail()
        if not attempt.has_begun or events is None or not plan.may_migrate():
            return False
        return progress_of(events, before or self._progress) is not None

    def receive(self, event: Event) -> Commands:
        """Take an event; return what is to be done."""
        return _NOTHING if self.is_over else _STEPS[type(event)](self, event)

    # ------------------------------------------------------------------------------------------- until it is sent

    def _parsed(self, event: Parsed) -> Commands:
        self.plan, self._inbound, self._isl_tokens = event.plan, event.inbound, event.isl_tokens
        return _QUEUE if self.plan.phase == "whole" else (MakeRoute(), *_QUEUE)

    def _refused(self, event: Refused) -> Commands:
        return self._refuse(event.refusal)

    def _admitted(self, _event: Admitted) -> Commands:
        return _DECIDE

    def _not_chosen(self, event: NotChosen) -> Commands:
        plan = self.plan
        assert plan is not None
        if event.exclusions is not None and plan.no_candidate():
            return (Rerouted(plan.reroutes[-1]), *_GO_ON)
        unserved = () if event.exclusions is None else (Unserved(event.exclusions),)
        return (*unserved, *self._refuse(event.refusal if self._failed is None else self._failed.refusal()))

    def _chosen(self, event: Chosen) -> Commands:
        plan, attempt = self.plan, event.attempt
        assert plan is not None
        self.attempt = attempt
        is_aside = plan.is_aside
        if is_aside:
            self._has_asides = True
        keeps_events = self._is_resumed or (plan.may_migrate() and not is_aside)
        send = Send(attempt, is_aside, keeps_events, self._handoff, self._progress)
        retried, self._retried = self._retried, None
        return (send,) if retried is None else (Retried(retried), send)

    # ------------------------------------------------------------------------------------------- the answer

    def _head_came(self, event: HeadCame) -> Commands:
        attempt = self.attempt
        if attempt is None:
            return (Drop(),)
        if not attempt.on_head(event.status, event.headers) and not (event.is_last and attempt.is_engines_word):
            return (Drop(),)
        if self._is_resumed and not attempt.is_answered:
            attempt.reason = f"status {event.status} to an answer that was to go on"
            return (Drop(),)
        assert self.plan is not None
        return (Relay(attempt, self._prefilled_by, self.plan.is_aside),)

    def _first_byte_came(self, _event: FirstByteCame) -> Commands:
        attempt = self.attempt
        if attempt is None:
            return _NOTHING
        assert self.plan is not None
        attempt.has_begun = True
        is_stream = attempt.is_streamed and not self.plan.is_aside
        return (AnswerBegan(attempt, is_stream and self._is_first_token(attempt)),)

    def _is_first_token(self, attempt: Attempt) -> bool:
        """Return whether the answer's first token is the client's first one."""
        return attempt.is_answered and self._progress is None

    def _answer_ended(self, event: AnswerEnded) -> Commands:
        attempt, plan = self.attempt, self.plan
        if attempt is None or plan is None:
            return _NOTHING
        if plan.is_aside:
            return self._collected(attempt, plan, event.body)
        usage = usage_in(event.body)
        came_whole = bool(event.body) and not attempt.has_begun
        later_tokens = self._later_tokens(attempt, usage, event.later_events)
        outcome = attempt.end_outcome
        over = AttemptOver(attempt, outcome, usage, came_whole=came_whole, later_tokens=later_tokens)
        self.attempt, self.is_over = None, True
        end = RequestOver(outcome, None)
        if not attempt.is_answered:
            return (over, end)
        is_whole = came_whole or not attempt.is_streamed
        answered = Answered(attempt, usage, is_first_token=is_whole and self._is_first_token(attempt))
        return (over, answered, end)

    def _later_tokens(self, attempt: Attempt, usage: Usage, later_events: int) -> int:
        """Return how many tokens this worker's answer had behind its first; 0 if unknown."""
        if not self._inbound.has_one_choice:
            return 0
        if usage.output_tokens is None or (attempt.is_streamed and not later_events):
            return later_events
        before = 0 if self._progress is None else self._progress.token_count
        return max(0, usage.output_tokens - before - 1)

    def _collected(self, attempt: Attempt, plan: Phases, body: bytes) -> Commands:
        """A prefill worker has answered, with the decode worker's parameters or with the complete answer."""
        limit_tokens = self._inbound.limit_tokens
        if limit_tokens is not None and self._progress is not None:
            limit_tokens -= self._progress.token_count
        try:
            answer = (
                prefill_answer(body, limit_tokens=limit_tokens)
                if attempt.is_answered
                else PrefillAnswer(body, b"", is_final=True)
            )
        except AnswerUnusable as error:
            return self._call_failed(CallFailed("body", str(error), has_begun=False))
        usage = usage_in(body[-_USAGE_BYTES:])
        over = AttemptOver(attempt, attempt.end_outcome, usage, later_tokens=0)
        self.attempt = None
        if answer.is_final:
            return (over, *self._reply(attempt, answer.body, usage))
        self._handoff, self._prefilled_by = answer, attempt
        plan.prefilled()
        return (over, *_GO_ON)

    def _reply(self, attempt: Attempt, body: bytes, usage: Usage) -> Commands:
        """Answer the client with a prefill worker's answer."""
        self.is_over = True
        if not attempt.is_answered:
            return (RequestOver(attempt.end_outcome, None), Reply(attempt, body, b""))
        inbound = self._inbound
        events = as_events(body, include_usage=inbound.include_usage) if inbound.stream else b""
        answered = Answered(attempt, usage, is_first_token=self._is_first_token(attempt))
        return (answered, RequestOver("ok", None), Reply(attempt, body, events))

    # ------------------------------------------------------------------------------------------- from worker to worker

    def _answer_dropped(self, _event: AnswerDropped) -> Commands:
        return _NOTHING if self.attempt is None else self._again(self.attempt)

    def _call_failed(self, event: CallFailed) -> Commands:
        """A worker failed. Another is tried, unless the client has part of this one's answer."""
        attempt = self.attempt
        if attempt is None:  # a call whose answer is not awaited
            return _NOTHING
        assert self.plan is not None
        attempt.phase, attempt.reason = event.stage, event.reason
        if event.stage == "local":
            return self._refuse(refusals.unavailable(event.reason, "overloaded"))
        if event.has_begun and not self.plan.is_aside:
            lost = (StreamLost("not_resumable"),) if attempt.is_streamed else ()
            return (*self._end_attempt("failed"), *lost, *self._end("failed"))
        return self._again(attempt)

    def _resume_failed(self, event: ResumeFailed) -> Commands:
        """The chosen worker cannot continue the stream, by no fault of its own."""
        attempt, plan, failed = self.attempt, self.plan, self._failed
        assert attempt is not None
        assert plan is not None
        assert failed is not None
        attempt.phase = "local"
        over = self._end_attempt("cancelled")
        if event.elsewhere and plan.failed(attempt.rank, took_handoff=False):
            return (*over, MakeRoute(), Retry(max(1, plan.retries)))
        return (*over, *self._refuse(failed.refusal(), "no_worker" if event.elsewhere else "no_seam"))

    def _served_elsewhere(self, _event: ServedElsewhere) -> Commands:
        attempt = self.attempt
        if attempt is None:
            return _NOTHING
        attempt.phase, attempt.reason = "connect", "the gateway sent the request to another endpoint"
        return (*self._end_attempt("failed"), *_GO_ON)

    def _again(self, attempt: Attempt) -> Commands:
        plan = self.plan
        assert plan is not None
        self._failed, self._retried = attempt, attempt.phase
        over = self._end_attempt("failed")
        reroutes = len(plan.reroutes)
        took_handoff = attempt.phase != "connect" and attempt.retry_after_s is None
        if not plan.failed(attempt.rank, took_handoff=took_handoff):
            return (*over, *self._refuse(attempt.refusal()))
        rerouted = [Rerouted(why) for why in plan.reroutes[reroutes:]]
        return (*over, *rerouted, MakeRoute(), Retry(max(1, plan.retries)))

    def _stream_cut(self, event: StreamCut) -> Commands:
        """The stream of a failed worker continues: from another worker, or with its end. Else nothing is returned."""
        attempt, plan = self.attempt, self.plan
        if event.stage == "local" or attempt is None or plan is None or event.events is None:
            return _NOTHING
        had_begun = attempt.has_begun
        progress = progress_of(event.events, event.before or self._progress) if had_begun else self._progress
        if progress is None:
            return _NOTHING
        attempt.phase, attempt.reason = event.stage, event.reason
        limit_tokens = self._inbound.limit_tokens
        if progress.finish_reason is not None or progress.token_count == limit_tokens:
            return (*self._end_attempt("failed"), *self._end("ok"), FinishStream(self._ending(progress)))
        self._is_resumed = True
        if not had_begun:
            return (FinishStream(b""), *self._again(attempt))
        if not plan.may_migrate():
            return _NOTHING
        self._progress, self._failed = progress, attempt
        over = self._end_attempt("failed")
        plan.migrated(attempt.rank)
        if plan.phase == "prefill" and limit_tokens == progress.token_count + 1:
            plan.compute_at_decode()  # as for requests for one token
        rerouted = Rerouted(plan.reroutes[-1])
        return (*over, rerouted, FinishStream(b""), MakeRoute(), Retry(1))

    def _ending(self, progress: Progress) -> bytes:
        """Return the end of a stream that has all of its tokens."""
        inbound = self._inbound
        prompt_tokens = self._isl_tokens if inbound.include_usage else None
        return progress.ending(inbound.model, is_chat=inbound.path == CHAT, prompt_tokens=prompt_tokens)

    # ------------------------------------------------------------------------------------------- the end

    def _client_left(self, _event: ClientLeft) -> Commands:
        fetches = self.attempt is None and self.plan is not None and self.plan.phase == "decode"
        over = (*self._end_attempt("cancelled"), *self._end("cancelled"))
        if not self._has_asides:
            return over
        return (*over, GiveUp(self._handoff, self._progress) if fetches else GiveUp(None, None))

    def _refuse(self, refusal: Refusal, loss: "StreamLoss" = "no_worker") -> Commands:
        """End with an error; `loss` is why a stream that has begun is lost."""
        lost = (StreamLost(loss),) if self._is_resumed else ()
        return (*self._end_attempt("failed"), *lost, *self._end(refusal.outcome, refusal), Refuse(refusal))

    def _end_attempt(self, outcome: OutcomeName) -> Commands:
        attempt, self.attempt = self.attempt, None
        return () if attempt is None else (AttemptOver(attempt, outcome, NO_USAGE),)

    def _end(self, outcome: OutcomeName, refusal: Refusal | None = None) -> Commands:
        self.is_over = True
        return (RequestOver(outcome, refusal),)

    @classmethod
    def steps(cls) -> dict[type, Callable[["RequestMachine", Any], Commands]]:
        """Return the method of each kind of event."""
        return {
            Parsed: cls._parsed,
            Refused: cls._refused,
            Admitted: cls._admitted,
            Chosen: cls._chosen,
            NotChosen: cls._not_chosen,
            HeadCame: cls._head_came,
            FirstByteCame: cls._first_byte_came,
            AnswerEnded: cls._answer_ended,
            AnswerDropped: cls._answer_dropped,
            ServedElsewhere: cls._served_elsewhere,
            CallFailed: cls._call_failed,
            StreamCut: cls._stream_cut,
            ResumeFailed: cls._resume_failed,
            ClientLeft: cls._client_left,
        }


_STEPS = RequestMachine.steps()
