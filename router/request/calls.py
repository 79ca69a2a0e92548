"""Builds the request that a worker gets, for each phase.

A worker that computes prompt and answer has phase `whole`, or `alone` where the fleet has prefill and decode workers.

| phase | body | limits |
|---|---|---|
| whole | the client's | as the client streams or not |
| whole, embeddings | the client's | of a whole answer, which may be 4 MiB before it is passed on |
| whole, responses | the client's; its stream's tokens are its `.delta` events | as the client streams or not |
| prefill | one token, not streamed, `context_only` (`handoff.py`) | of a whole answer |
| decode | with the prefill answer's parameters | as the client streams or not; may outlive the client |
| alone | of a worker whose role is to decode: `context_and_generation` | as the client streams or not |

The body is preceded by the prompt's token ids, for workers that take them, and by the progress of a resumed answer
(`kv_protocol/continuation.py`). An attached engine that tells token ids is asked for those of streams that may
migrate; it resumes an answer as a completion (`resumption.py`). If the client leaves between prefill and decode, the
decode worker still gets the request, so that it fetches the prompt's KV from the prefill worker; then its connection is
closed.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kv_protocol.body_limits import Body, Bytes
from kv_protocol.continuation import HEADER, KEY, Progress
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_protocol.openai.inbound import COMPLETIONS
from kv_protocol.openai.passed import PassedInbound
from kv_protocol.openai.requests import Inbound, is_given
from kv_runtime.text.chat_messages import TextError
from router.config import RouterSettings
from router.decision.verdict import Verdict
from router.http.exchange import BUFFERED_BYTES_MAX, CallLimits, OutboundCall
from router.http.heads import Headers
from router.http.limits import CONNECT_S
from router.http.stream_replay import StreamReplayBuffer
from router.prompt.chains import EncodedPrompt, with_prompt_ids
from router.request.handoff import CONTEXT_AND_GENERATION, PrefillAnswer, decode_body, prefill_body
from router.request.request import Request
from router.request.resumption import (
    CannotResume,
    Decoder,
    EventRewriter,
    asking,
    behind,
    check_text_only,
    may_be_asked,
    resume_point,
    resumed_body,
    stops_of,
)

_TRACE_NAMES = frozenset({b"traceparent", b"tracestate"})
_PASSED_ON = _TRACE_NAMES | {b"x-session-id"}
"""Client headers that workers get, too."""
_TRACE_BYTES_MAX = 1024
"""Longer trace headers are dropped: W3C Trace Context asks for 512 bytes of `tracestate`; workers refuse 8,190."""
_EMBEDDINGS_BYTES_MAX = 4 << 20
"""Largest buffered answer with embeddings; until it is complete the request can be retried at another worker."""
_DELTA = b'.delta"'
"""End of the type of each event of a response's stream that has tokens; in their text JSON escapes the quote."""
_NO_HANDOFF = PrefillAnswer(b"", CONTEXT_AND_GENERATION, is_final=False)
"""Parameters for a decode worker that also computes the prompt."""
_EVENT_BYTES_MAX = 16 << 20
"""Of a stream with token ids an event is passed on once it is complete: the first one has those of the prompt."""
_CONTINUING = frozenset({"trtllm", "simulated", "none"})
"""Event sources of agents, which read `kv_continue`; engines ignore it, and would begin the answer again."""
CONTINUABLE_HEADER = HEADER.encode()
"""A client that sends it gets a stream's token comments."""
_JSON = b"application/json"
_CONTINUABLE = b"%b: 1\r\n" % CONTINUABLE_HEADER


class Calls:
    """Builds calls to workers of the fleet."""

    def __init__(self, settings: RouterSettings, detokenizer: Callable[[], Decoder]) -> None:
        """`detokenizer` returns a new one of the models' text."""
        self._detokenizer = detokenizer
        limits = settings.failures
        self._streamed = CallLimits(CONNECT_S, limits.first_byte_s, limits.between_bytes_s, limits.total_s)
        self._buffered = self._streamed._replace(first_byte_s=limits.whole_s)
        self._text_bytes_max = settings.data.prompt_bytes_max  # of workers, too: it counts a prompt's text and ids
        token = settings.data.worker_token.get_secret_value()
        authorization = f"authorization: Bearer {token}\r\n".encode() if token else b""
        self._head = b"%bcontent-type: %b\r\nx-request-id: " % (authorization, _JSON)

    def call(
        self, request: Request[Any], verdict: Verdict, client: Headers, replay_buffer: StreamReplayBuffer | None
    ) -> OutboundCall:
        """Return the call to the winner, after the request's handoff and progress.

        `client` are the headers of the client's request; `replay_buffer` gets the rest of the answer.

        Raises:
            CannotResume: the winner cannot continue the answer.
        """
        inbound, body, prompt, progress = request.inbound, request.body, request.prompt, request.progress
        registration, route, text = verdict.registration, verdict.request, body.text
        phase, headers = route.phase, b"%b%b\r\n" % (self._head, route.request_id.encode())
        if not _PASSED_ON.isdisjoint(client):
            headers += _passed_on(client)
        if phase != "whole" and not is_given(inbound.disaggregated_params):
            text = _of_phase(text, phase, request.handoff or _NO_HANDOFF, registration.role)
        is_kept = replay_buffer is not None or progress is not None
        if is_kept and registration.event_source not in _CONTINUING:
            if replay_buffer is not None and _tells_ids(registration, verdict, inbound, body, progress):
                return self._with_ids(registration, verdict, inbound, body, headers, prompt, progress, replay_buffer)
            replay_buffer = None  # this engine tells no ids: its stream is not recorded
        if progress is not None:
            text = _continuing(text, registration, inbound, progress)
        if replay_buffer is not None or CONTINUABLE_HEADER in client:
            headers += _CONTINUABLE
        sent: bytes | tuple[Bytes | memoryview, ...] = text if isinstance(text, bytes) else (text,)
        if registration.accepts_token_ids:
            headers += b"x-dp-rank: %d\r\n" % verdict.winner.dp_rank
            ids = b"" if prompt is None else prompt.ids
            if ids and len(text) + 4 * len(ids) // 3 <= self._text_bytes_max:
                sent = with_prompt_ids(text, ids)
        if body.images:
            parts = sent if isinstance(sent, tuple) else (sent,)
            sent = *parts[:-1], *body.with_images(parts[-1])
        limits = self._streamed if inbound.stream and phase != "prefill" else self._buffered
        is_once = phase == "decode"
        call = OutboundCall(registration.base_url, inbound.path, headers, sent, limits, replay_buffer, is_once)
        return call if route.endpoint in DEFAULT_ENDPOINTS else _of_endpoint(call, request)

    def _with_ids(
        self,
        registration: WorkerRegistered,
        verdict: Verdict,
        inbound: Inbound,
        body: Body,
        headers: bytes,
        prompt: EncodedPrompt | None,
        progress: Progress | None,
        replay_buffer: StreamReplayBuffer,
    ) -> OutboundCall:
        """Return the call to an attached engine whose stream tells token ids, or resumes behind `progress`."""
        path = inbound.path
        replay_buffer.is_engines = True
        sent: tuple[bytes | memoryview, ...]
        if progress is not None:
            path, sent = COMPLETIONS, (self._resumed(registration, inbound, body, prompt, progress, replay_buffer),)
        elif inbound.return_token_ids:
            sent = (memoryview(body.text),)
        else:
            sent = asking(body.text)
            replay_buffer.hides_ids = True
        if registration.accepts_token_ids:
            headers = b"%bx-dp-rank: %d\r\n" % (headers, verdict.winner.dp_rank)
        rest = self._streamed, replay_buffer, False, _EVENT_BYTES_MAX
        return OutboundCall(registration.base_url, path, headers, sent, *rest)

    def _resumed(
        self,
        registration: WorkerRegistered,
        inbound: Inbound,
        body: Body,
        prompt: EncodedPrompt | None,
        progress: Progress,
        replay_buffer: StreamReplayBuffer,
    ) -> bytes:
        """Return the body of the completion that goes on, and have its events rewritten."""
        if body.images or not may_be_asked(inbound):
            raise CannotResume("the request's answer is more than its text")
        check_text_only(inbound)
        stops = stops_of(inbound)
        if not progress.prompt:  # an agent began it: its stop strings hold other text back
            if stops or prompt is None or not prompt.ids:
                raise CannotResume("the prompt's ids are unknown, or text is held back", elsewhere=True)
            progress = replace(progress, prompt=prompt.ids)
        try:
            point = resume_point(progress, self._detokenizer(), stops)
        except TextError as error:
            raise CannotResume(str(error)) from error
        if inbound.return_token_ids and point.token_count < progress.token_count:
            raise CannotResume("the client has ids of half a character")
        before = behind(progress, point)
        sent = resumed_body(body.text, inbound, before, max_seq_len=registration.max_seq_len)
        replay_buffer.rewriter, replay_buffer.before = EventRewriter(inbound, before, point.held), before
        return sent


def _of_endpoint(call: OutboundCall, request: Request[Any]) -> OutboundCall:
    """Return the call with what differs from a chat's and a completion's."""
    inbound, endpoint, headers = request.inbound, request.inbound.endpoint, call.headers
    if isinstance(inbound, PassedInbound):
        headers = headers.replace(_JSON, request.exchange.headers.get(b"content-type", _JSON), 1)
    return replace(
        call,
        headers=headers,
        buffered_bytes_max=_EMBEDDINGS_BYTES_MAX if endpoint == "embeddings" else BUFFERED_BYTES_MAX,
        token_mark=_DELTA if endpoint == "responses" else b"",
        method=request.exchange.method,
    )


def _tells_ids(
    registration: WorkerRegistered, verdict: Verdict, inbound: Inbound, body: Body, progress: Progress | None
) -> bool:
    """Return whether the attached engine is to tell the stream's token ids."""
    if not registration.stream_token_ids or verdict.request.phase != "whole":
        return False
    return progress is not None or (not body.images and may_be_asked(inbound))


def _continuing(text: Bytes, registration: WorkerRegistered, inbound: Inbound, progress: Progress) -> bytes:
    """Return the body with which an agent continues the answer; raise `CannotResume` if it would not as it is."""
    if registration.event_source not in _CONTINUING:
        raise CannotResume("the engine continues no answer", elsewhere=True)
    if progress.prompt and (not progress.tokens or progress.is_parsed or stops_of(inbound)):
        raise CannotResume("an agent continues behind an engine only if no text is held back", elsewhere=True)
    return b'{"%b":%b,%b' % (KEY.encode(), progress.continuation(), bytes(text[text.index(b"{") + 1 :]))


def _of_phase(body: Bytes, phase: str, handoff: PrefillAnswer, role: str) -> Bytes:
    if phase == "prefill":
        return prefill_body(body)
    if phase == "decode":
        return decode_body(body, handoff.params, handoff.prompt_ids)
    return decode_body(body, _NO_HANDOFF.params) if role == "decode" else body


def _passed_on(headers: Headers) -> bytes:
    found = [(name, headers[name]) for name in sorted(_PASSED_ON & headers.keys())]
    return b"".join(
        [b"%b: %b\r\n" % each for each in found if each[0] not in _TRACE_NAMES or len(each[1]) <= _TRACE_BYTES_MAX]
    )
