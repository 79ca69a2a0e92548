"""Compares the token ids of chats with those that engines make of them, so that a wrong template is found at once.

    a worker joins that states /tokenize    its engine tokenizes a fixed chat
    each ASKEDth request that is sent       if it is a chat, its worker's engine tokenizes that chat, too

An engine whose ids differ is asked for them again at once. If they differ again, the chats of its model are unrendered
(`prompts.py`) and routed by their text, until the worker leaves or its ids of a chat are equal. An engine that refuses
to tokenize, or answers without ids, is not judged.

Source: vllm-project/vllm, `vllm/entrypoints/serve/tokenize/protocol.py` (`TokenizeChatRequest`; `tokens` of the
answer).
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import aiohttp
import msgspec
import structlog

from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.requests import ChatInbound, Inbound, RequestInvalid
from kv_runtime.clock import Clock
from kv_runtime.http.answers import bounded_body
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, counter
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from router.fleet.registry import Fleet, Worker
from router.fleet.trust import Disparity
from router.prompt.prompts import ModelPrompts

PATH = "/tokenize"
ASKED = 997
"""`EngineParity.sample` gets one request of so many: a prime, so that it meets chats in traffic that alternates."""
CHAT_BYTES_MAX = 64 << 10
_PERIOD_S = 1.0
_ANSWER_S = 3.0
_ANSWER_BYTES_MAX = 16 << 20
_AT_ONCE = 16
_HELLO = [
    {"role": "system", "content": "You are a careful assistant."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3? Grüße, 世界."},
]
_SENT = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Keys of a chat that a request to `/tokenize` may have, too."""

Outcome = Literal["equal", "differs", "unanswered"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_log = structlog.get_logger("router")


class _Answer(msgspec.Struct):
    tokens: list[int]


_Instance = tuple[str, str]
"""The id of a worker, and the id of its process."""


class _Tokenization(NamedTuple):
    """A chat that an engine is to tokenize by the request `body`, and the `options` by which the router renders it."""

    at: _Instance
    body: dict[str, Any]
    options: dict[str, Any]


class EngineParity:
    """Asks engines, `_AT_ONCE` at a time, and keeps their differences."""

    def __init__(self, fleet: Fleet, prompts: ModelPrompts, text: Text, clock: Clock, token: str = "") -> None:
        """`token` is the bearer token of workers; empty: none."""
        self._fleet, self._prompts, self._text, self._clock = fleet, prompts, text, clock
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._samples: deque[_Tokenization] = deque(maxlen=_AT_ONCE)
        self._joined: set[_Instance] = set()
        self._differs: dict[_Instance, Disparity] = {}
        self._ended = Counter[Outcome]()

    def differs(self, worker_id: str, instance: str) -> tuple[Disparity, ...]:
        """Return the known differences of the worker's prompts from the router's; empty: none is known."""
        found = self._differs.get((worker_id, instance))
        return () if found is None else (found,)

    def sample(self, inbound: Inbound, worker_id: str) -> None:
        """Compare a request that this worker gets, if it is a chat that the engine can tokenize."""
        worker = self._fleet.worker(worker_id)
        if worker is None or PATH not in worker.registration.api_endpoints:
            return
        if not isinstance(inbound, ChatInbound) or inbound.changed_by or inbound.reasoning_effort:
            return
        if sum(map(len, inbound.prompt_parts)) > CHAT_BYTES_MAX:
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
            self._samples.append(_Tokenization((worker_id, worker.registration.instance), body, options))

    async def run(self, stop: asyncio.Event) -> None:
        """Ask engines until `stop` is set."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            while not stop.is_set():
                waiting = self._first_ones() + list(self._samples)
                self._samples.clear()
                while waiting and not stop.is_set():
                    some, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
                    await until(stop, asyncio.gather(*(self._compare(session, each) for each in some)))
                await self._clock.wait(stop, _PERIOD_S)

    def families(self) -> Iterator[Family]:
        """Yield the metrics."""
        samples = [((outcome,), float(self._ended[outcome])) for outcome in OUTCOMES]
        meaning = "Chats that engines were asked to tokenize: their ids equal the router's, differ, or did not come"
        yield counter("engine_parity_checks", meaning, ("outcome",), samples)

    def _present(self) -> Mapping[_Instance, Worker]:
        """Return the workers of the fleet; forget others' differences, and update `other_chats` of the prompts."""
        workers = self._fleet.workers()
        present = {(each.registration.worker_id, each.registration.instance): each for each in workers}
        self._differs = {at: found for at, found in self._differs.items() if at in present}
        names = {name for at in self._differs for name in present[at].registration.served_names}
        self._prompts.other_chats = frozenset(names)
        return present

    def _first_ones(self) -> list[_Tokenization]:
        """Return the fixed chat for each worker that joined since the last call."""
        present = self._present()
        joined = [at for at in present if at not in self._joined]
        self._joined = set(present)
        return [
            _Tokenization(at, {"model": stated.served_names[0], "messages": _HELLO}, {})
            for at in joined
            if PATH in (stated := present[at].registration).api_endpoints
            and stated.tokenizer_digest in ("", self._text.tokenizer_digest)
        ]

    async def _compare(self, session: aiohttp.ClientSession, asked: _Tokenization) -> None:
        worker = self._fleet.worker(asked.at[0])
        if worker is None or worker.registration.instance != asked.at[1]:
            return
        url = worker.registration.base_url.rstrip("/") + PATH
        found = None
        for _ in range(2):  # around midnight the engine's template may write another date
            theirs = await self._ids(session, url, asked.body)
            if theirs is None:
                self._ended["unanswered"] += 1
                return
            pack = partial(self._text.pack_chat, asked.body["messages"], **asked.options)
            try:
                ours = unpack_tokens(await asyncio.to_thread(pack))
            except TextError:
                return
            found = _difference(ours, theirs)
            if found is None:
                break
        self._judge(asked.at, found)

    async def _ids(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int] | None:
        try:
            async with session.post(url, json=body, allow_redirects=False) as answer:
                data = await bounded_body(answer, _ANSWER_BYTES_MAX)
                return msgspec.json.decode(data, type=_Answer).tokens if answer.ok and data is not None else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return None

    def _judge(self, at: _Instance, found: Disparity | None) -> None:
        self._ended["equal" if found is None else "differs"] += 1
        if (found is not None) == (at in self._differs):
            return
        if found is None:
            del self._differs[at]
            _log.info("engine_parity_restored", worker=at[0])
        else:
            self._differs[at] = found
            _log.warning("engine_parity_lost", worker=at[0], found=found.found, allowed=found.allowed)
        self._present()


def _difference(ours: list[int], theirs: list[int]) -> Disparity | None:
    """Return the first token that differs; None: all are equal."""
    for at, (their, our) in enumerate(zip_longest(theirs, ours, fillvalue="the end")):
        if their != our:
            return Disparity("prompt_ids", f"token {at}: {their}", f"token {at}: {our}")
    return None
