"""Builds the request that a worker gets, for each phase.

| phase | body | limits |
|---|---|---|
| whole | the client's | as the client streams or not |
| whole, embeddings | the client's | of a whole answer, which may be 4 MiB before it is passed on |
| whole, responses | the client's; its stream's tokens are its `.delta` events | as the client streams or not |
| prefill | one token, not streamed, `context_only` (`handoff.py`) | of a whole answer |
| decode | with the prefill answer's parameters | as the client streams or not; may outlive the client |
| alone | of a worker whose role is to decode: `context_and_generation` | as the client streams or not |

The body is preceded by the prompt's token ids, for workers that take them, and by the progress of a resumed answer
(`kv_protocol/continuation.py`). If the client leaves between prefill and decode, the decode worker still gets the
request, so that it fetches the prompt's KV from the prefill worker; then its connection is closed.
"""

from kv_protocol.body_limits import Body, Bytes
from kv_protocol.continuation import HEADER, KEY, Progress
from kv_protocol.openai.requests import Inbound, is_given
from router.config import RouterSettings
from router.decision.verdict import Verdict
from router.fleet.registry import Fleet
from router.prompt import EncodedPrompt, with_prompt_ids
from router.request.handoff import CONTEXT_AND_GENERATION, PrefillAnswer, decode_body, prefill_body
from router.server.exchange import BUFFERED_BYTES_MAX, OutboundCall
from router.server.heads import Headers
from router.server.stream_replay import StreamReplayBuffer

_PASSED_ON = (b"traceparent", b"tracestate", b"x-session-id")
"""Client headers that workers get, too."""
_TRACE_NAMES = frozenset({b"traceparent", b"tracestate"})
_TRACE_BYTES_MAX = 1024
"""Longer trace headers are dropped: W3C Trace Context asks for 512 bytes of `tracestate`; workers refuse 8,190."""
_PASSED_ON_NAMES = frozenset(_PASSED_ON)
_EMBEDDINGS_BYTES_MAX = 4 << 20
"""Largest buffered answer with embeddings; until it is complete the request can be retried at another worker."""
_DELTA = b'.delta"'
"""End of the type of each event of a response's stream that has tokens; in their text JSON escapes the quote."""
_NO_HANDOFF = PrefillAnswer(b"", CONTEXT_AND_GENERATION, is_final=False)
"""Parameters for a decode worker that also computes the prompt."""
_HEADER = HEADER.encode()
_CONTINUABLE = b"%b: 1\r\n" % _HEADER


def wants_tokens(headers: Headers) -> bool:
    """Return whether the client asks for a stream's token comments."""
    return _HEADER in headers


class Calls:
    """Builds calls to workers of the fleet."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self._fleet = fleet
        limits = settings.failures
        self._limits = limits.connect_s, limits.first_byte_s, limits.between_bytes_s, limits.total_s
        self._buffered_limits = limits.connect_s, limits.whole_s, limits.between_bytes_s, limits.total_s
        self._worker_headers = _worker_headers(settings.data.worker_token.get_secret_value())

    def call(
        self,
        verdict: Verdict,
        inbound: Inbound,
        body: Body,
        client: Headers,
        prompt: EncodedPrompt | None,
        handoff: PrefillAnswer | None = None,
        progress: Progress | None = None,
        replay_buffer: StreamReplayBuffer | None = None,
    ) -> OutboundCall | None:
        """Return the call to the winner; None if it left the fleet meanwhile.

        `client` are the headers of the client's request, `handoff` is the prefill worker's answer, `progress` how far
        the answer has come; `replay_buffer` gets the rest of it.
        """
        worker = self._fleet.worker(verdict.winner.worker_id)
        if worker is None:
            return None
        registration, phase = worker.registration, verdict.request.phase
        text = body.text
        if phase != "whole" and not is_given(inbound.disaggregated_params):
            text = _of_phase(text, phase, handoff or _NO_HANDOFF, registration.role)
        if progress is not None:
            text = b'{"%b":%b,%b' % (KEY.encode(), progress.continuation(), bytes(text[text.index(b"{") + 1 :]))
        headers = b"%bx-request-id: %b\r\n" % (self._worker_headers, verdict.request.request_id.encode())
        if not _PASSED_ON_NAMES.isdisjoint(client):
            headers += _passed_on(client)
        if replay_buffer is not None or wants_tokens(client):
            headers += _CONTINUABLE
        limits = self._limits if inbound.stream and phase != "prefill" else self._buffered_limits
        is_decode = phase == "decode"
        endpoint = verdict.request.endpoint
        buffered_bytes_max = _EMBEDDINGS_BYTES_MAX if endpoint == "embeddings" else BUFFERED_BYTES_MAX
        token_mark = _DELTA if endpoint == "responses" else b""
        rest = (*limits, replay_buffer, is_decode, buffered_bytes_max, token_mark)
        if not registration.accepts_token_ids:
            sent = text if isinstance(text, bytes) and not body.images else body.with_images(text)
            return OutboundCall(registration.base_url, inbound.path, headers, sent, *rest)
        headers = b"%bx-dp-rank: %d\r\n" % (headers, verdict.winner.dp_rank)
        parts = (text,) if prompt is None else with_prompt_ids(text, prompt.ids, prompt.encoded)
        if body.images:
            parts = (*parts[:-1], *body.with_images(parts[-1]))
        return OutboundCall(registration.base_url, inbound.path, headers, parts, *rest)


def _of_phase(body: Bytes, phase: str, handoff: PrefillAnswer, role: str) -> Bytes:
    if phase == "prefill":
        return prefill_body(body)
    if phase == "decode":
        return decode_body(body, handoff.params, handoff.prompt_ids)
    return decode_body(body, _NO_HANDOFF.params) if role == "decode" else body


def _passed_on(headers: Headers) -> bytes:
    lines = b""
    for name in _PASSED_ON:
        value = headers.get(name)
        if value is not None and (name not in _TRACE_NAMES or len(value) <= _TRACE_BYTES_MAX):
            lines += b"%s: %s\r\n" % (name, value)
    return lines


def _worker_headers(token: str) -> bytes:
    lines = b"content-type: application/json\r\n"
    return lines + f"authorization: Bearer {token}\r\n".encode() if token else lines
