"""Compares the token ids of chats with those that engines make of them, so that a wrong template is found at once.

    when             what is asked
    -------------    ---------------------------------------------------------------------------------------------
    a worker joins   `POST /tokenize` with a fixed chat, where the worker states that path
    of each ASKED    `POST /tokenize` with that chat, at the worker that got it, off the request's path
    th chat

A worker that differs twice in a row, asked again at once, makes its model's chats unrendered (`prompts.py`): they are
routed by their text, as with trust FALLBACK, until it leaves, or a chat is equal again. An engine that refuses the
question, or whose answer has no ids, is not judged.

Source: vllm-project/vllm, `vllm/entrypoints/serve/tokenize/protocol.py` (`TokenizeChatRequest`; `tokens` of the
answer).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import aiohttp
import msgspec
import structlog

from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.requests import ChatInbound, RequestInvalid
from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, counter
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from router.fleet.registry import Fleet, Worker
from router.fleet.trust import Disparity
from router.prompt.prompts import ModelPrompts

PATH = "/tokenize"
ASKED = 1000
CHAT_BYTES_MAX = 64 << 10
_PERIOD_S = 1.0
_ANSWER_S = 10.0
_ANSWER_BYTES_MAX = 16 << 20
_WAITING_MAX = 16
_HELLO = [
    {"role": "system", "content": "You are a careful assistant."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3? Grüße, 世界."},
]
_SENT = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Keys of a chat that the question has, too."""

Outcome = Literal["equal", "differs", "unanswered"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_log = structlog.get_logger("router")


class _Answer(msgspec.Struct):
    tokens: list[int]


_answers = msgspec.json.Decoder(_Answer)


class _Question(NamedTuple):
    """A chat as the router reads it, for one instance of a worker."""

    worker_id: str
    instance: str
    body: dict[str, Any]
    options: dict[str, Any]


class EngineParity:
    """Asks engines, one at a time, and keeps what differs."""

    def __init__(self, fleet: Fleet, prompts: ModelPrompts, text: Text, clock: Clock, token: str = "") -> None:
        """`token` is the bearer token of workers; empty: none."""
        self._fleet, self._prompts, self._text, self._clock = fleet, prompts, text, clock
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._waiting: deque[_Question] = deque(maxlen=_WAITING_MAX)
        self._joined: set[tuple[str, str]] = set()
        self._differs: dict[tuple[str, str], Disparity] = {}
        self._seen = 0
        self._ended = Counter[Outcome]()

    def differs(self, worker_id: str, instance: str) -> tuple[Disparity, ...]:
        """Return in what the worker's prompts differ from the router's; empty: nothing is known to."""
        found = self._differs.get((worker_id, instance))
        return () if found is None else (found,)

    def chat_sent(self, inbound: ChatInbound, worker_id: str) -> None:
        """A chat goes to this worker: of each `ASKED`th its ids are asked for."""
        self._seen += 1
        if self._seen % ASKED or inbound.rendered_bytes > CHAT_BYTES_MAX or inbound.changed_by:
            return
        worker = self._fleet.worker(worker_id)
        if worker is None or PATH not in worker.registration.api_endpoints or inbound.reasoning_effort:
            return
        try:
            messages, options = inbound.read_messages(), inbound.read_options()
        except RequestInvalid:
            return
        given = {"messages": messages, **options}
        if "template_kwargs" in given:
            given["chat_template_kwargs"] = given.pop("template_kwargs")
        if given.keys() <= set(_SENT):
            body = {"model": inbound.model, **given}
            self._waiting.append(_Question(worker_id, worker.registration.instance, body, options))

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until `stop` is set."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            while not stop.is_set():
                self._look_at_the_fleet()
                while self._waiting and not stop.is_set():
                    await until(stop, self._compare(session, self._waiting.popleft()))
                await until(stop, self._clock.sleep(_PERIOD_S))

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        samples = [((outcome,), float(self._ended[outcome])) for outcome in OUTCOMES]
        yield counter("engine_parity_checks", "Chats whose ids an engine was asked for", ("outcome",), samples)

    def _look_at_the_fleet(self) -> None:
        present = {(each.registration.worker_id, each.registration.instance): each for each in self._fleet.workers()}
        self._joined &= present.keys()
        self._differs = {at: found for at, found in self._differs.items() if at in present}
        for at, worker in present.items():
            if at not in self._joined:
                self._joined.add(at)
                self._ask_first(worker)
        self._tell(present)

    def _ask_first(self, worker: Worker) -> None:
        registration = worker.registration
        is_ours = registration.tokenizer_digest in ("", self._text.tokenizer_digest)
        if is_ours and PATH in registration.api_endpoints:
            body = {"model": registration.served_names[0], "messages": _HELLO}
            self._waiting.append(_Question(registration.worker_id, registration.instance, body, {}))

    async def _compare(self, session: aiohttp.ClientSession, question: _Question) -> None:
        worker = self._fleet.worker(question.worker_id)
        if worker is None or worker.registration.instance != question.instance:
            return
        url = worker.registration.base_url.rstrip("/") + PATH
        found = None
        for _ in range(2):  # at midnight a template may write another day there
            theirs = await self._ids(session, url, question.body)
            if theirs is None:
                self._ended["unanswered"] += 1
                return
            try:
                ours = unpack_tokens(self._text.pack_chat(question.body["messages"], **question.options))
            except TextError:
                return
            found = _difference(ours, theirs)
            if found is None:
                break
        self._judge(question, found)

    async def _ids(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int] | None:
        try:
            async with session.post(url, json=body, allow_redirects=False) as answer:
                data = bytearray()
                while (part := await answer.content.readany()) and len(data) <= _ANSWER_BYTES_MAX:
                    data += part
                return _answers.decode(data).tokens if answer.ok else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return None

    def _judge(self, question: _Question, found: Disparity | None) -> None:
        at = question.worker_id, question.instance
        self._ended["equal" if found is None else "differs"] += 1
        if found is None and self._differs.pop(at, None) is not None:
            _log.info("engine_parity_restored", worker=question.worker_id)
        elif found is not None and at not in self._differs:
            self._differs[at] = found
            _log.warning("engine_parity_lost", worker=question.worker_id, found=found.found, allowed=found.allowed)
        self._look_at_the_fleet()

    def _tell(self, present: dict[tuple[str, str], Worker]) -> None:
        names = {name for at in self._differs for name in present[at].registration.served_names}
        self._prompts.other_chats = frozenset(names)


def _difference(ours: list[int], theirs: list[int]) -> Disparity | None:
    """Return the first token that differs; None: all are equal."""
    if ours == theirs:
        return None
    at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(ours), len(theirs)) if at is None else at
    shown = [f"token {at}: {ids[at] if at < len(ids) else 'the end'}" for ids in (theirs, ours)]
    return Disparity("prompt_ids", *shown)
