"""Serves chats, completions and responses with the engine: a request from its bytes to its answer.

    failure                                          the client gets                       counted as
    invalid request, or refused by the engine        400, the field, found, allowed        refused
    its model is neither a served name nor a LoRA    404                                   refused
    the encode worker is unavailable                 503, with the retry time              failed
    the engine stops                                 503; in a stream an error event       failed
    the engine fails this request only               500; in a stream an error event       failed
    the client disconnects                           -; the engine's request is aborted    cancelled

If the reader of a stream of one choice can resume it on another worker (`x-kv-continuable`), the stream carries its
token ids, and is cut if the engine stops (`kv_protocol/continuation.py`). A header of an unstreamed answer has the time
since its first token (`kv_protocol/decode_time.py`).

Request headers: `x-dp-rank`, a rank of this worker; `x-session-id`, the conversation, up to 128 printable characters,
others are ignored; `traceparent` and `tracestate`. In-flight requests are bounded (`in_flight.py`).

An unstreamed answer with log probabilities is rendered on a thread, one answer at a time.
"""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial

from aiohttp import web

from kv_protocol.body_limits import SCANNED_BYTES, Body, BodyLimits, Bytes
from kv_protocol.continuation import HEADER, token_comment
from kv_protocol.decode_time import DECODE_HEADER, decode_header
from kv_protocol.fleet import Role
from kv_protocol.openai.requests import Request, RequestInvalid
from kv_runtime.clock import Clock
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from worker_agent.api.answers import CompletionAnswer
from worker_agent.api.bodies import dp_rank_of, engine_refusal, failure, no_such_model, read_request, refusal, worked
from worker_agent.api.choice_text import AnswerParsing
from worker_agent.api.generation import Generation, full_pieces
from worker_agent.api.in_flight import HandledRequest, RequestOutcome
from worker_agent.api.parsers.families import PLAIN, AnswerFormat
from worker_agent.api.prompts import EnginePrompts
from worker_agent.api.request_rules import RequestRules, check_several
from worker_agent.api.responses import ResponseAnswer, ResponseChat
from worker_agent.port.types import Engine, EngineError, EngineRequest, EngineStopped

DEFAULT_LIMITS = BodyLimits(section="worker")
_SESSION_CHARACTERS_MAX = 128
_TRACE_HEADERS = ("traceparent", "tracestate")
_NS_PER_S = 1_000_000_000


class Completions:
    """The generating endpoints of one worker. `names` are all valid values of a request's `model`."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        prompts: EnginePrompts,
        *,
        served_names: tuple[str, ...],
        default_max_tokens: int,
        clock: Clock,
        role: Role = "aggregated",
        loras: tuple[str, ...] = (),
        body_limits: BodyLimits = DEFAULT_LIMITS,
        answer_format: AnswerFormat = PLAIN,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        on_output: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_output` is called at each output of the engine."""
        self.description, self.role, self.names = engine.describe(), role, (*served_names, *loras)
        self._engine, self._text, self._prompts, self._clock = engine, text, prompts, clock
        self._parsing = AnswerParsing(PLAIN if role == "prefill" else answer_format, text)  # its one token needs none
        self.tool_calls_total = self._parsing.tool_calls_total
        """How many tool calls the answers had, by ending."""
        self._rules = RequestRules(
            self.description,
            text,
            default_max_tokens=default_max_tokens,
            role=role,
            loras=loras,
            stop_tokens=self._parsing.stop_tokens,
        )
        self._body_limits = body_limits
        self._reading, self._rendering = ThreadPoolExecutor(1, "read"), ThreadPoolExecutor(1, "render")
        self._new_id, self._on_output = new_id, on_output

    async def answered(self, decode: Callable[[Bytes], Request], http: web.Request) -> HandledRequest:
        """Return the answer to a request that `decode` reads, and how the request ended."""
        try:
            request, body = await read_request(http, decode, self._body_limits, self._reading)
            if request.model not in self.names:
                return no_such_model(request.model, self.names), "refused"
            before = await worked(len(body.text) > SCANNED_BYTES, lambda: self._rules.before(request))
            engine_requests = await self._engine_requests(http, request, body, before)
            first, prompts = engine_requests[0], len(engine_requests)
            created = self._clock.wall_ns() // _NS_PER_S
            answer: CompletionAnswer | ResponseAnswer
            if isinstance(request, ResponseChat):
                answer = ResponseAnswer(request, first.request_id, created)
            else:
                answer = CompletionAnswer(request, first.request_id, created, self._text.token_bytes, prompts)
            generation = Generation(
                self._engine,
                self._text,
                engine_requests,
                request.stops,
                now_s=self._clock.now,
                before=before,
                parser_of=self._parsing.parser_of(request, first.prompt[: len(first.prompt) - len(before)], answer.id),
                on_output=self._on_output,
            )
            if request.stream:
                handled = await self._stream(http, generation, answer, include_usage=request.include_usage)
            else:
                handled = await self._unstreamed(generation, answer)
        except (RequestInvalid, TextError) as error:
            return refusal(error), "refused"
        except EngineError as error:
            return engine_refusal(error)
        self._parsing.count(generation.parsers)
        return handled

    async def _engine_requests(
        self, http: web.Request, request: Request, body: Body, before: tuple[int, ...]
    ) -> list[EngineRequest]:
        dp_rank = dp_rank_of(http, self.description.dp_ranks)
        wishes = await worked(len(body.text) > SCANNED_BYTES, lambda: self._rules.wishes(request))
        prompts = await self._prompts.prompts(request, wishes, body)
        check_several(request, len(prompts))
        return [
            self._rules.engine_request(
                request,
                prompt,
                forced=self._parsing.forced_guide(request, prompt.prompt, wishes.handoff),
                request_id=self._new_id(),
                dp_rank=dp_rank,
                before=before,
                conversation_id=_conversation(http),
                trace_headers={name: http.headers[name] for name in _TRACE_HEADERS if name in http.headers},
            )
            for prompt in prompts
        ]

    async def _unstreamed(self, generation: Generation, answer: CompletionAnswer | ResponseAnswer) -> HandledRequest:
        pieces = await full_pieces(generation.pieces())
        render = partial(answer.full_body, pieces, generation.usage())
        if not any(piece.spans or piece.prompt_logprobs for piece in pieces):
            body = render()
        else:
            body = await asyncio.get_running_loop().run_in_executor(self._rendering, render)
        headers = {DECODE_HEADER: decode_header(generation.decode_s)}
        return web.Response(body=body, content_type="application/json", headers=headers), "ok"

    async def _stream(
        self,
        http: web.Request,
        generation: Generation,
        answer: CompletionAnswer | ResponseAnswer,
        *,
        include_usage: bool,
    ) -> HandledRequest:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        outcome: RequestOutcome = "failed"
        is_continuable = HEADER in http.headers and answer.can_go_on  # the stream carries token ids
        async with aclosing(generation.pieces()) as pieces:
            first = await anext(pieces)
            await response.prepare(http)
            try:
                opening = answer.opening()
                events = answer.events(first, always=True)
                comment = token_comment(generation.take_token_ids()) if is_continuable else b""
                await response.write(opening + comment + events)
                async for piece in pieces:
                    if events := answer.events(piece):
                        comment = token_comment(generation.take_token_ids()) if is_continuable else b""
                        await response.write(comment + events)
            except EngineError as error:
                if is_continuable and isinstance(error, EngineStopped) and http.transport is not None:
                    http.transport.abort()  # another worker resumes the stream
                    return response, "failed"
                ending = answer.failed(str(error), failure(error)[1])
            else:
                ending, outcome = answer.ending(generation.usage(), include_usage=include_usage), "ok"
        await response.write(ending)
        await response.write_eof()
        return response, outcome


def _conversation(http: web.Request) -> str | None:
    session = http.headers.get("x-session-id", "")
    return session if session.isprintable() and 0 < len(session) <= _SESSION_CHARACTERS_MAX else None
