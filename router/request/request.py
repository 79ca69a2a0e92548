"""The life of one request, from its bytes to its settlement.

    read ─> prompt ─> plan ─> admission ─> decide ─> send ─> relay ─> settle

| where | may go wrong | then |
|---|---|---|
| read, prompt | the client's fault | 4xx that names the field |
| admission | the tenant has too much waiting; the queue is full, or the wait too long | 429; 503 |
| decide | no worker is eligible | another phase of the plan; else 503 or 400 with every rank's reason |
| sent | a worker fails before its answer, or is busy | another worker, as planned; then the last error, 502 or 503 |
| | it fails later | the stream resumes on another worker, or ends with an error event |
| anywhere | the client leaves | its resources are released at once; a decode worker still fetches the prompt's KV |

A prefill worker's answer is collected, and its handoff sent to a decode worker. `router/decision/plan.py` says which
phase follows an answer or a failure, and how often a request is tried. A `Destination` chooses the workers
(`destination.py`).

`live` reads the request and sends it to a worker within one turn of the event loop, unless the request has to wait for
a thread or for admission. The relay of the worker's answer then calls the `on_` methods. One of them ends the request,
or runs what leads to another worker: `_retry`, `_migrate`, `_go_on_from_prefill`, `_move`.
"""

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from kv_protocol.body_limits import Body
from kv_protocol.continuation import Progress, progress_of
from kv_protocol.decided import RouteRequest
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.inbound import CHAT
from kv_protocol.openai.requests import Inbound
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.plan import RequestPlan, StreamLoss
from router.http import refusals
from router.http.exchange import EVENT_STREAM, JSON, BufferedResponse, Exchange, UpstreamStage, header_lines
from router.http.heads import Headers
from router.http.refusals import Refusal, RequestRejected
from router.native import built
from router.prompt.chains import EncodedPrompt
from router.request.callback_coroutine import CallbackCoroutine
from router.request.destination import REDIRECTS, Attempt, Destination, Gateway
from router.request.handoff import AnswerUnusable, PrefillAnswer, as_events, prefill_answer
from router.request.replies import refusal_of
from router.request.resumption import CannotResume

if TYPE_CHECKING:
    from kv_protocol.ids import WorkerRank
    from router.queue.waiting import Place
    from router.request.tracing import RequestTrace

A = TypeVar("A", bound=Attempt)


class Request(CallbackCoroutine, Generic[A]):
    """One request, and the handler of its calls. `run` takes `live()`, or a coroutine that only reads the request.

    `body`, `inbound` and `model` are set once the body is parsed, `prompt`, `plan` and `route` once it `is_read`.
    """

    body: Body
    inbound: Inbound
    prompt: EncodedPrompt | None = None
    plan: RequestPlan
    route: RouteRequest
    """The route of the present phase; `first_route` has the fields as the client sent them."""
    first_route: RouteRequest
    model = ""
    has_one_choice = True
    salt = ""
    """Like `has_one_choice`, the same as `inbound` has, if a fleet serves the request."""
    gateway: Gateway | None = None
    """The gateway that sends the request itself; None: the router sends it."""
    trace: "RequestTrace | None" = None
    place: "Place | None" = None
    """Its place in the queue, while it waits there."""
    events_when_left = 0
    """How many events of the answer after its first bytes had come when the client left."""
    attempt: A | None = None
    """The present attempt; None while no worker has the request."""
    attempts: tuple[A, ...] = ()
    """The attempts that are over, the first one first."""
    ttft_s: float | None = None
    """Seconds from the first decision to the client's first token; None until that token is known to have come."""
    stream_loss: StreamLoss | None = None
    """Why a stream that had begun ended with an error."""
    handoff: PrefillAnswer | None = None
    """The prefill worker's answer."""
    progress: Progress | None = None
    """How far the answer had come when its last worker failed."""
    prefilled_by: "WorkerRank | None" = None
    """The rank that computed the prompt, if it is not the one that answers."""
    _failed: A | None = None
    _unmovable: A | None = None
    """An attempt that has a reason to move, but stays: the plan forbids it, or no worker could continue its stream."""
    _aside: BufferedResponse | None = None

    def __init__(self, exchange: Exchange, destination: Destination[A], mode: str = "") -> None:
        """`mode` names the mode in metrics and logs."""
        self.exchange, self.destination, self.mode = exchange, destination, mode

    @property
    def is_read(self) -> bool:
        """Whether all was read: the plan is set last."""
        return hasattr(self, "plan")

    @property
    def detours(self) -> tuple[int, int]:
        """How often the request was retried at another worker, and how often its stream migrated to one."""
        migrations = self.plan.migrations if self.is_read else 0
        return sum(each.is_retried for each in self.attempts[:-1]), migrations

    @property
    def may_resume(self) -> bool:
        """Whether another worker may continue the stream of the attempt that begins; if so, its events are kept."""
        return self.exchange.has_begun or (self.plan.may_migrate and not self.plan.is_aside and not self.is_over)

    # ------------------------------------------------------------------------------------------- to a worker

    async def live(self) -> None:
        """Read the request, wait for admission, and send it to a worker. `run` this while the client is connected."""
        self.exchange.when_gone, destination = self._left, self.destination
        await destination.read(self)
        if destination.is_bounded:
            await destination.admitted(self)
        self._send()

    def on_error(self, error: Exception) -> None:
        """Refuse the request because of an error of any kind."""
        self._refuse(refusal_of(error, self))

    def _send(self) -> None:
        """Choose a worker and send it the request. Its answer calls the `on_` methods, perhaps before this returns."""
        destination = self.destination
        while not self.is_over:
            try:
                attempt = self.attempt = destination.choose(self)
                call = destination.call(self, attempt)
            except (NoEligibleWorker, WorkerNotNamed, RequestRejected) as error:
                if self.enters_other_phase(error):
                    continue
                raise
            except CannotResume as error:
                self.run(self._pass_over(attempt, elsewhere=error.elsewhere))
                return
            attempt.replay_buffer = call.replay_buffer
            if self.plan.is_aside:
                aside = self._aside = BufferedResponse(self.exchange.outward)
                aside.ask(call, self)
            else:
                self.exchange.forward(call, self)
            return

    def enters_other_phase(self, error: Exception) -> bool:
        """Route the request for another phase if `error` says that no worker is eligible; return whether it was.

        If it was not, raise the error of the worker that failed last, if one did.
        """
        if isinstance(error, NoEligibleWorker):
            plan = self.plan.no_candidate()
            if plan is not None:
                self.plan = plan
                self.destination.routed(self)
                return True
            self.destination.unserved(self, error.exclusions)
        if self._failed is not None:
            raise RequestRejected(self._failed.refusal()) from error
        return False

    # ------------------------------------------------------------------------------------------- to another one

    async def _go_on_from_prefill(self, attempt: A, body: bytes) -> None:
        """Take a prefill worker's answer to a decode worker; to the client if it is final; if it is unusable, retry."""
        limit_tokens = self.inbound.limit_tokens
        if limit_tokens is not None and self.progress is not None:
            limit_tokens -= self.progress.token_count
        answer = PrefillAnswer(body, b"", is_final=True)
        if attempt.is_success:
            try:
                answer = prefill_answer(body, limit_tokens=limit_tokens)
            except AnswerUnusable as error:
                attempt.stage, attempt.reason = "body", str(error)
                await self._retry(attempt)
                return
        attempt.answer = built.answer_of(body, attempt.headers, attempt.is_streamed, has_begun=True)
        if answer.is_final:
            status, content_type, body = attempt.status, JSON, answer.body
            if attempt.is_success and self.inbound.stream:
                status, content_type = 200, EVENT_STREAM
                body = as_events(body, include_usage=self.inbound.include_usage)
            self.end(attempt.end_outcome)
            self.exchange.answer(status, body, content_type=content_type, headers=header_lines(attempt.lines))
            return
        self._settle(attempt, attempt.end_outcome)
        self.handoff, self.prefilled_by = answer, attempt.rank
        self.plan = self.plan.to("decode")
        self.destination.routed(self)
        self._send()

    async def _retry(self, attempt: A) -> None:
        """The worker failed before its answer: another is tried, if the plan has one."""
        self._failed = attempt
        self._settle(attempt, "failed")
        plan = self.plan.failed(attempt.rank, took_handoff=attempt.took_handoff)
        if plan is None:
            raise RequestRejected(attempt.refusal())
        self.plan, attempt.is_retried = plan, True
        await self._send_elsewhere()

    async def _migrate(self, attempt: A, progress: Progress) -> None:
        """The worker failed during its stream: another one continues the stream."""
        self.progress, self._failed = progress, attempt
        self._settle(attempt, "failed")
        plan = self.plan.migrated(attempt.rank)
        if plan.phase == "prefill" and self.inbound.limit_tokens == progress.token_count + 1:
            plan = plan.to("alone")  # one token is left: a request for one token is not split either
        self.plan = plan
        await self._send_elsewhere()

    async def _move(self, attempt: A, worker_id: str) -> None:
        """The gateway sent the request to another worker than the chosen one: book the work there."""
        self._settle(attempt, "failed")
        self.destination.routed(self, worker_id)
        self._send()

    async def _pass_over(self, attempt: A, *, elsewhere: bool) -> None:
        """The chosen worker cannot continue the stream, by no fault of its own; `elsewhere`: another worker may."""
        failed = self._failed
        assert failed is not None
        attempt.stage = "local"
        self._settle(attempt, "cancelled")
        plan = self.plan.failed(attempt.rank, took_handoff=False) if elsewhere else None
        if plan is None:
            self._refuse(failed.refusal(), "no_worker" if elsewhere else "no_seam")
        else:
            self.plan = plan
            await self._send_elsewhere()

    async def _send_elsewhere(self) -> None:
        """Route the request anew, and send it after a pause."""
        self.destination.routed(self)
        pause_s = self.destination.pause_s(self)
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self.resume)
            await self.until_resumed()
        self._send()

    # ------------------------------------------------------------------------------------------- the end

    def end(self, outcome: OutcomeName, refusal: Refusal | None = None) -> None:
        """The request and its attempt are over; no other worker follows. Further calls do nothing."""
        if self.is_over:
            return
        self.is_over, attempt = True, self.attempt
        if attempt is not None:
            self._settle(attempt, outcome)
        self.destination.ended(self, outcome, refusal)

    def _settle(self, attempt: A, outcome: OutcomeName) -> None:
        """The attempt is over, for whatever reason. Only this ends its lease."""
        self.attempt = None
        self.destination.settle(self, attempt, outcome)
        self.attempts += (attempt,)

    def _refuse(self, refusal: Refusal, loss: StreamLoss = "no_worker") -> None:
        """End with an error; `loss` is why a stream that has begun is lost."""
        if self.is_over:
            return
        if self.exchange.has_begun:
            self.stream_loss = loss
        self.end(refusal.outcome, refusal)
        named = ((b"x-request-id", self.route.request_id.encode()),) if self.is_read else ()
        self.exchange.refuse(refusal, *named)

    def _left(self, later_events: int) -> None:
        """End the request: the client left. A decode worker still fetches KV that waits at a prefill worker."""
        if self.is_over:
            return
        self.events_when_left = later_events
        fetches = self.attempt is None and self.handoff is not None and self.plan.phase == "decode"
        self.end("cancelled")
        self.stop()
        aside = self._aside
        if aside is not None:
            aside.give_up()
            call = self.destination.fetching_call(self) if fetches else None
            if call is not None:
                aside.ask(call, self)
                aside.give_up()  # the call `is_once`: it is sent all the same, and ends when its answer begins

    # ------------------------------------------------------------------------------------------- as a call's handler

    def on_head(self, status: int, headers: Headers, is_stream: bool) -> bytes | None:  # noqa: FBT001 - a fact
        """Return the header lines to add to the answer; None: it is not passed on."""
        attempt = self.attempt
        if attempt is None:
            return None
        attempt.status, attempt.headers, attempt.is_streamed = status, headers, is_stream
        if status < REDIRECTS.start:
            return attempt.lines
        attempt.judge(status)
        if attempt.reason:
            is_tried_again = self._has_retry(attempt) and self.destination.has_other(self)
            if is_tried_again or not attempt.is_passed_on:
                return None
        if self.exchange.has_begun and not attempt.is_success:
            attempt.reason = f"status {status} to an answer that was to go on"
            return None
        return attempt.lines

    def on_dropped(self) -> None:
        """Retry the request: the answer that `on_head` refused is read or closed."""
        if self.attempt is not None:
            self.run(self._retry(self.attempt))

    def on_first_byte(self) -> None:
        """The answer has begun."""
        attempt = self.attempt
        if attempt is not None:
            attempt.has_begun = True
            self.destination.began(self, attempt)

    def on_bytes(self) -> None:
        """Bytes of the answer came after its first ones: notify the attempt."""
        if self.attempt is not None:
            self.attempt.on_bytes()

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The answer is complete: the client has it, or the router if it is a prefill worker's."""
        attempt = self.attempt
        if attempt is None:
            return
        if self.plan.is_aside:
            assert self._aside is not None
            self.run(self._go_on_from_prefill(attempt, self._aside.body))
            return
        tokens_before, is_one = 0, self.has_one_choice
        if (buffer := attempt.replay_buffer) is not None:
            later_events = buffer.later_tokens or later_events
            tokens_before = 0 if self.progress is None else self.progress.token_count
        attempt.answer = built.answer_of(
            tail, attempt.headers, attempt.is_streamed, attempt.has_begun, later_events, tokens_before, is_one
        )
        self.end("ok" if attempt.is_success else attempt.end_outcome)

    def on_failed(self, stage: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The worker failed. `begun`: the client has part of the answer."""
        attempt = self.attempt
        if attempt is None:  # a call that only fetches KV: nobody waits for its answer
            return
        attempt.stage, attempt.reason = stage, reason
        if stage == "local":
            self._refuse(refusals.unavailable(reason, "overloaded"))
        elif begun and not self.plan.is_aside:
            if attempt.is_streamed:
                self.stream_loss = "not_resumable"
            self.end("failed")
        else:
            self.run(self._retry(attempt))

    def reason_to_stop(self, quiet_s: float, begun: bool) -> str:  # noqa: FBT001 - a callback's fact
        """Return why the worker's answer is no longer awaited: the request is to move, and another worker can take it.

        `begun`: the client has part of the answer; `quiet_s`: seconds since its last byte.
        """
        attempt, plan = self.attempt, self.plan
        if attempt is None or (begun and attempt is self._unmovable):
            return ""
        move = self.destination.reason_to_move(attempt, quiet_s, begun=begun)
        if move is None:
            return ""
        may_move = plan.may_migrate if begun and attempt.has_begun else self._has_retry(attempt)
        if not may_move or (begun and self._progress_of(attempt) is None):
            self._unmovable = attempt
            return ""
        if not self.destination.has_other(self):
            return ""
        attempt.is_at_fault = move.is_fault
        return move.reason

    def on_cut(self, stage: UpstreamStage, reason: str) -> bytes | None:
        """Return the end of a failed worker's stream if only that is missing; b"": another continues; None: error."""
        attempt = self.attempt
        progress = None if attempt is None or stage == "local" else self._progress_of(attempt)
        if attempt is None or progress is None:
            return None
        attempt.stage, attempt.reason = stage, reason
        inbound = self.inbound
        if progress.finish_reason is not None or progress.token_count == inbound.limit_tokens:
            attempt.answer = built.Answer(output_tokens=progress.token_count, later_tokens=0)
            self._settle(attempt, "failed")
            self.end("ok")
            prompt_tokens = self.route.known_tokens if inbound.include_usage else None
            return progress.ending(inbound.model, is_chat=inbound.path == CHAT, prompt_tokens=prompt_tokens)
        if attempt.has_begun and not self.plan.may_migrate:
            return None
        self.run(self._migrate(attempt, progress) if attempt.has_begun else self._retry(attempt))
        return b""

    def _has_retry(self, attempt: A) -> bool:
        """Return whether the request is tried again if its worker, which may have taken the handoff, fails now."""
        return self.plan.failed(attempt.rank, took_handoff=True) is not None

    def _progress_of(self, attempt: A) -> Progress | None:
        """Return how far the answer has come; None if another worker cannot continue it."""
        buffer = attempt.replay_buffer
        if buffer is None or buffer.kept.is_overfull:
            return None
        return progress_of(buffer.kept.events, buffer.before or self.progress) if attempt.has_begun else self.progress

    def served_elsewhere(self, worker_id: str) -> bool:
        """A gateway reports which worker answered; if it is another one, book the work there. Return whether it is."""
        attempt = self.attempt
        if attempt is None or worker_id == attempt.rank.worker_id:
            return False
        attempt.stage, attempt.reason = "connect", "the gateway sent the request to another endpoint"
        self.run(self._move(attempt, worker_id))
        return True
