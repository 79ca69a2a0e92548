"""Builds the request that a worker gets, for each phase.

The phase of a request with one worker is `whole`, or `alone` in a fleet of prefill and decode workers.

| phase | body | limits |
|---|---|---|
| whole | the client's | of a stream if the client asks for one, else of a whole answer |
| whole, embeddings | the client's | of a whole answer; up to 4 MiB of it wait until it is complete |
| whole, responses | the client's; its stream's tokens are its `.delta` events | as for `whole` |
| prefill | one token, not streamed, `context_only` (`handoff.py`) | of a whole answer |
| decode | with the prefill answer's parameters | as for `whole`; the call may outlive the client |
| alone | the client's; with `context_and_generation` if the worker's role is to decode | as for `whole` |

A worker with the engine in its agent also gets the prompt's token ids and the progress of a resumed answer, as keys
before the others of the body (`kv_protocol/continuation.py`); for attached engines see `resumption.py`.
"""

from collections.abc import Callable

from msgspec.structs import replace

from kv_protocol.body_limits import Bytes
from kv_protocol.continuation import KEY, Progress
from kv_protocol.decided import RequestPhase
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_protocol.openai.inbound import COMPLETIONS, PassedInbound
from kv_protocol.openai.requests import Inbound, is_given
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Detokenizer
from router.config import RouterSettings
from router.decision.verdict import Verdict
from router.http.exchange import BUFFERED_BYTES_MAX, JSON, CallLimits, OutboundCall
from router.http.heads import CallLines
from router.http.stream_replay import CONTINUABLE_HEADER, StreamReplayBuffer, without_ids
from router.prompt.chains import with_prompt_ids
from router.request.destination import Destination, RankAttempt
from router.request.handoff import CONTEXT_AND_GENERATION, PrefillAnswer, decode_body, prefill_body
from router.request.request import Request
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

_EMBEDDINGS_BYTES_MAX = 4 << 20
"""Largest buffered answer with embeddings; until it is complete the request can be retried at another worker."""
_DELTA = b'.delta"'
"""Ends the type of each event with tokens in a response's stream. No answer's text has it: JSON escapes quotes."""
_NO_HANDOFF = PrefillAnswer(b"", CONTEXT_AND_GENERATION, is_final=False)
"""Parameters for a decode worker that also computes the prompt."""
_EVENT_BYTES_MAX = 16 << 20
"""Longest event of a stream with token ids that waits to be complete: the first event has the ids of the prompt."""
_CONTINUING = frozenset({"trtllm", "simulated", "none"})
"""Event sources of workers whose agent runs the engine: these agents read `kv_continue`."""
_CONTINUABLE = b"%b: 1\r\n" % CONTINUABLE_HEADER


class Calls(Destination[RankAttempt]):
    """The part of `Serving` that builds calls to workers of the fleet."""

    def __init__(self, settings: RouterSettings, detokenizer: Callable[[], Detokenizer]) -> None:
        """`detokenizer` returns a new detokenizer for the models' text."""
        self._detokenizer = detokenizer
        limits = settings.failures
        self._streamed = CallLimits(limits.first_byte_s, limits.between_bytes_s, limits.total_s)
        self._buffered = self._streamed._replace(first_byte_s=limits.whole_s)
        self._text_bytes_max = settings.data.prompt_bytes_max  # workers bound text and ids together by it, too
        token = settings.data.worker_token.get_secret_value()
        authorization = f"authorization: Bearer {token}\r\n".encode() if token else b""
        self._lines = CallLines(b"%bcontent-type: %b\r\n" % (authorization, JSON)).lines

    def call(self, request: Request[RankAttempt], attempt: RankAttempt) -> OutboundCall:
        """Return the call to the winner, with the request's handoff and progress, and set `attempt.lines`.

        Raises:
            CannotResume: the winner cannot continue the answer.
        """
        verdict, inbound, prompt = attempt.verdict, request.inbound, request.prompt
        registration, body, phase = verdict.registration, request.body, verdict.request.phase
        client = request.exchange.headers if request.trace is None else request.trace.calling(request)
        headers, attempt.lines = self._lines(verdict, client)
        if inbound.nvext is not None or (prompt is not None and prompt.unrendered):
            attempt.lines += _rare_lines(request)
        text, limits, replay_buffer = body.text, self._buffered, None
        if phase != "whole":
            text = _of_phase(text, request, attempt)
        if inbound.stream:
            if registration.stream_token_ids and _tells_ids(request, registration, phase):
                return self._with_ids(request, verdict, headers)
            limits = self._buffered if phase == "prefill" else self._streamed
            keeps = _continues(registration) and request.may_resume
            replay_buffer = StreamReplayBuffer(hides_tokens=CONTINUABLE_HEADER not in client) if keeps else None
            if request.progress is not None:
                text = _continuing(text, registration, inbound, request.progress)
        if replay_buffer is not None or CONTINUABLE_HEADER in client:
            headers += _CONTINUABLE
        sent: Bytes | tuple[Bytes | memoryview, ...] = text
        if registration.accepts_token_ids:
            headers += b"x-dp-rank: %d\r\n" % verdict.winner.dp_rank
            ids = b"" if prompt is None else prompt.ids
            if ids and len(text) + 4 * len(ids) // 3 <= self._text_bytes_max:
                sent = with_prompt_ids(text, ids)
        if body.images:
            parts = sent if isinstance(sent, tuple) else (sent,)
            sent = *parts[:-1], *body.with_images(parts[-1])
        is_once = phase == "decode"
        call = OutboundCall(registration.base_url, inbound.path, headers, sent, limits, replay_buffer, is_once)
        is_plain = request.gateway is None and inbound.endpoint in DEFAULT_ENDPOINTS
        return call if is_plain else _changed(call, request, verdict)

    def _with_ids(self, request: Request[RankAttempt], verdict: Verdict, headers: bytes) -> OutboundCall:
        """Return the call to an attached engine that is to report its stream's token ids, or to resume a stream."""
        inbound, text, registration = request.inbound, request.body.text, verdict.registration
        path = inbound.path
        sent: tuple[Bytes | memoryview, ...] = asking(text)
        if request.progress is not None:
            path = COMPLETIONS
            sent, replay_buffer = self._resumed(registration, request, request.progress)
        elif inbound.return_token_ids:
            sent, replay_buffer = (text,), StreamReplayBuffer(is_engines=True)
        else:
            replay_buffer = StreamReplayBuffer(is_engines=True, rewriter=without_ids)
        if registration.accepts_token_ids:
            headers = b"%bx-dp-rank: %d\r\n" % (headers, verdict.winner.dp_rank)
        rest = self._streamed, replay_buffer, False, _EVENT_BYTES_MAX
        return OutboundCall(registration.base_url, path, headers, sent, *rest)

    def _resumed(
        self, registration: WorkerRegistered, request: Request[RankAttempt], progress: Progress
    ) -> tuple[tuple[bytes], StreamReplayBuffer]:
        """Return the body of the completion that continues the answer, and the buffer that rewrites its events."""
        inbound, body, prompt = request.inbound, request.body, request.prompt
        if body.images or not may_be_asked(inbound):
            raise CannotResume("the request's answer is more than its text")
        check_text_only(inbound)
        stops = stops_of(inbound)
        if not progress.prompt:  # an agent began the answer: it holds back other text for stop strings
            if stops or prompt is None or not prompt.ids:
                raise CannotResume("the prompt's ids are unknown, or text is held back", elsewhere=True)
            progress = replace(progress, prompt=prompt.ids)
        try:
            point = resume_point(progress, self._detokenizer().push, stops)
        except TextError as error:
            raise CannotResume(str(error)) from error
        if inbound.return_token_ids and point.token_count < progress.token_count:
            raise CannotResume("the client has ids of half a character")
        before = behind(progress, point)
        sent = resumed_body(body.text, inbound, before, max_seq_len=registration.max_seq_len)
        rewriter = EventRewriter(inbound, before, point.held)
        return (sent,), StreamReplayBuffer(is_engines=True, rewriter=rewriter, before=before)


def _rare_lines(request: Request[RankAttempt]) -> bytes:
    """Return the header lines that only a few answers have."""
    prompt, lines = request.prompt, ""
    if prompt is not None and prompt.unrendered:
        lines += f"x-kv-unrendered: {prompt.unrendered}\r\n"
    if request.inbound.nvext is not None and (ignored := request.inbound.ineffective):
        lines += f"x-ignored-parameters: {', '.join(ignored)}\r\n"
    return lines.encode()


def _changed(call: OutboundCall, request: Request[RankAttempt], verdict: Verdict) -> OutboundCall:
    """Return the call, changed for endpoints other than chats and completions, and with a gateway's alternatives."""
    inbound, endpoint, headers, gateway = request.inbound, request.inbound.endpoint, call.headers, request.gateway
    if isinstance(inbound, PassedInbound):
        headers = headers.replace(JSON, request.exchange.headers.get(b"content-type", JSON), 1)
    is_pinned = request.route.pinned_worker == verdict.winner.worker_id
    return replace(
        call,
        headers=headers,
        buffered_bytes_max=_EMBEDDINGS_BYTES_MAX if endpoint == "embeddings" else BUFFERED_BYTES_MAX,
        token_mark=_DELTA if endpoint == "responses" else b"",
        method=request.exchange.method,
        alternatives=() if gateway is None or is_pinned else gateway.alternatives(verdict),
    )


def _tells_ids(request: Request[RankAttempt], registration: WorkerRegistered, phase: RequestPhase) -> bool:
    """Return whether the attached engine is to report the stream's token ids, which the replay buffer keeps."""
    if not request.may_resume or phase != "whole" or _continues(registration):
        return False
    return request.progress is not None or (not request.body.images and may_be_asked(request.inbound))


def _continues(registration: WorkerRegistered) -> bool:
    """Return whether the worker reads `kv_continue`. An attached engine ignores it and begins again, or refuses it."""
    return registration.accepts_token_ids and registration.event_source in _CONTINUING


def _continuing(text: Bytes, registration: WorkerRegistered, inbound: Inbound, progress: Progress) -> bytes:
    """Return the body with which an agent continues the answer; raise `CannotResume` if it might not do so exactly."""
    if not _continues(registration):
        raise CannotResume("the engine continues no answer", elsewhere=True)
    if progress.prompt and (not progress.tokens or progress.is_parsed or stops_of(inbound)):
        raise CannotResume("an agent continues behind an engine only if no text is held back", elsewhere=True)
    return b'{"%b":%b,%b' % (KEY.encode(), progress.continuation(), bytes(text[text.index(b"{") + 1 :]))


def _of_phase(body: Bytes, request: Request[RankAttempt], attempt: RankAttempt) -> Bytes:
    """Return the body for the phase; for a decode worker, add the prefill worker's name to the answer's lines."""
    phase, handoff = attempt.verdict.request.phase, request.handoff or _NO_HANDOFF
    if request.prefilled_by is not None and phase == "decode":
        attempt.lines += f"x-prefill-instance-id: {request.prefilled_by.worker_id}\r\n".encode()
    if is_given(request.inbound.disaggregated_params):
        return body
    if phase == "prefill":
        return prefill_body(body)
    if phase == "decode":
        return decode_body(body, handoff.params, handoff.prompt_ids)
    return decode_body(body, _NO_HANDOFF.params) if attempt.verdict.registration.role == "decode" else body
