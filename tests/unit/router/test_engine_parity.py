"""Token ids of chats, as an engine makes them and as the router does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_protocol.body_limits import Body
from kv_protocol.fleet import WorkerLeft, WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.openai.requests import CHAT, COMPLETIONS, ChatInbound, decode_inbound
from kv_runtime.text.byte_model import ByteText
from router.fleet.registry import Fleet, TextDigests
from router.prompt.chains import EncodedPrompt
from router.prompt.engine_parity import OUTCOMES, EngineParity
from router.prompt.prompts import ModelPrompts
from router.request import serving
from tests.support.chat_ids import chat_ids
from tests.support.manual_clock import ManualClock
from tests.unit.router.plane import Plane
from tests.unit.router.samples import MODEL, registered
from tests.unit.router.upstream import Exchange, Upstream, answers, completion

TEXT = ByteText()
STATES = ("chat", "completions", "/tokenize")
Ids = Callable[[list[int]], list[int]]


class Engine:
    """An engine's `/tokenize`: what it makes of the ids that the router makes, or no answer."""

    def __init__(self, changed: Ids | None = lambda ids: ids) -> None:
        self.changed, self.asked = changed, list[dict[str, Any]]()

    async def __call__(self, exchange: Exchange) -> None:
        body = json.loads(exchange.received.body)
        self.asked.append(body)
        if self.changed is None:
            await exchange.answer(404, b"{}")
            return
        options = {"tools": body["tools"]} if "tools" in body else {}
        ids = self.changed(chat_ids(TEXT, body["messages"], **options))
        await exchange.answer(200, json.dumps({"count": len(ids), "tokens": ids}).encode())


class Asking:
    """A fleet, and what asks its engines."""

    def __init__(self) -> None:
        self.clock, self.fleet = ManualClock(), Fleet(TextDigests(TEXT.tokenizer_digest, TEXT.template_digest))
        self.prompts = ModelPrompts(TEXT)
        self.parity = EngineParity(self.fleet, self.prompts, TEXT, self.clock, "secret")

    def join(self, base_url: str, worker_id: str = "w0", **changed: Any) -> WorkerRegistered:
        fields = {"api_endpoints": STATES, "tokenizer_digest": TEXT.tokenizer_digest, "event_source": "vllm"}
        worker = registered(worker_id, base_url=base_url, **fields | changed)
        self.fleet.apply(worker)
        return worker

    async def ended(self, checks: int) -> dict[str, float]:
        """Return how the checks ended, once there are so many."""
        async with asyncio.timeout(20):
            while True:
                (family,) = self.parity.families()
                counts = {each.labels["outcome"]: each.value for each in family.samples if each.name.endswith("_total")}
                if sum(counts.values()) >= checks:
                    return counts
                await self.clock.advance(1.0)
                await asyncio.sleep(0)

    def unrendered(self) -> str:
        made = self.prompts.prompt(Body(b""), chat(), Hashing(4))
        assert isinstance(made, EncodedPrompt)
        return made.unrendered


@asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    made, stop = Asking(), asyncio.Event()
    running = asyncio.ensure_future(made.parity.run(stop))
    yield made
    stop.set()
    await running


def chat(**fields: Any) -> ChatInbound:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    inbound = decode_inbound(CHAT, json.dumps(body).encode())
    assert isinstance(inbound, ChatInbound)
    return inbound


async def test_an_engine_that_makes_the_same_ids_is_asked_once_when_it_joins() -> None:
    engine = Engine()
    async with Upstream(engine) as upstream, asking() as made:
        worker = made.join(upstream.base_url)
        assert await made.ended(1) == {"equal": 1, "differs": 0, "unanswered": 0}
        await made.clock.advance(60.0)
    assert [each["model"] for each in engine.asked] == [MODEL]
    assert upstream.received[0].headers["authorization"] == "Bearer secret"
    assert (made.parity.differs("w0", worker.instance), made.unrendered()) == ((), "")


async def test_of_many_workers_that_join_at_once_each_is_asked() -> None:
    engine = Engine()
    async with Upstream(engine) as upstream, asking() as made:
        for number in range(100):
            made.join(upstream.base_url, f"w{number}")
        assert (await made.ended(100))["equal"] == 100
    assert len(engine.asked) == 100


@pytest.mark.parametrize(
    ("changed", "found", "allowed"),
    [
        (lambda ids: [ids[0], 7, *ids[2:]], "token 1: 7", f"token 1: {TEXT.encode('Y')[0]}"),
        (lambda ids: ids[:1], "token 1: the end", f"token 1: {TEXT.encode('Y')[0]}"),
    ],
)
async def test_the_first_token_that_differs_is_named_and_chats_are_routed_by_text_until_the_worker_leaves(
    changed: Ids, found: str, allowed: str
) -> None:
    async with Upstream(Engine(changed)) as upstream, asking() as made:
        with capture_logs() as logged:
            worker = made.join(upstream.base_url)
            await made.ended(1)
        (differs,) = made.parity.differs("w0", worker.instance)
        assert (differs.field, differs.found, differs.allowed) == ("prompt_ids", found, allowed)
        assert [line["event"] for line in logged] == ["engine_parity_lost"]
        assert made.unrendered() == "parity"
        made.fleet.apply(WorkerLeft(worker_id="w0", instance=worker.instance))
        async with asyncio.timeout(20):
            while made.unrendered():
                await made.clock.advance(1.0)
                await asyncio.sleep(0)


async def test_one_answer_that_differs_is_asked_again_before_it_counts() -> None:
    answers = iter([[1], None])
    engine = Engine(lambda ids: next(answers, None) or ids)
    async with Upstream(engine) as upstream, asking() as made:
        made.join(upstream.base_url)
        assert (await made.ended(1))["equal"] == 1
    assert len(engine.asked) == 2


async def test_an_engine_without_an_answer_is_not_judged() -> None:
    async with Upstream(Engine(None)) as upstream, asking() as made:
        made.join(upstream.base_url)
        assert (await made.ended(1))["unanswered"] == 1
        assert made.unrendered() == ""


@pytest.mark.parametrize("changed", [{"api_endpoints": ("chat",)}, {"tokenizer_digest": "another"}])
async def test_an_engine_without_the_path_or_with_another_tokenizer_is_not_asked(changed: dict[str, Any]) -> None:
    engine = Engine()
    async with Upstream(engine) as upstream, asking() as made:
        made.join(upstream.base_url, **changed)
        for _ in range(5):
            await made.clock.advance(1.0)
            await asyncio.sleep(0)
    assert engine.asked == []


async def test_of_ten_chats_each_is_asked_for_and_none_is_a_false_alarm() -> None:
    engine = Engine()
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with Upstream(engine) as upstream, asking() as made:
        made.join(upstream.base_url)
        await made.ended(1)
        for number in range(10):
            made.parity.sample(chat(tools=tools, messages=[{"role": "user", "content": f"number {number}"}]), "w0")
        assert await made.ended(11) == {"equal": 11, "differs": 0, "unanswered": 0}
    said = [each["messages"][0]["content"] for each in engine.asked[1:]]
    assert said == [f"number {number}" for number in range(10)]
    assert {json.dumps(each["tools"]) for each in engine.asked[1:]} == {json.dumps(tools)}


async def test_each_thousandth_request_is_a_sample(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ASKED", 2)
    async with Upstream(answers(200, completion())) as upstream:
        plane.join("w0", upstream.base_url)
        for _ in range(5):
            await plane.post()
    assert plane.sampled == [(MODEL, "w0")] * 2


@pytest.mark.parametrize("fields", [{"chat_template": "x"}, {"reasoning_effort": "low"}, {"documents": [{"a": "b"}]}])
async def test_a_chat_that_the_question_cannot_say_is_not_asked_for(fields: dict[str, Any]) -> None:
    engine = Engine()
    async with Upstream(engine) as upstream, asking() as made:
        made.join(upstream.base_url)
        await made.ended(1)
        made.parity.sample(chat(**fields), "w0")
        made.parity.sample(decode_inbound(COMPLETIONS, b'{"model":"m","prompt":"x"}'), "w0")
        for _ in range(5):
            await made.clock.advance(1.0)
            await asyncio.sleep(0)
    assert len(engine.asked) == 1
    assert set(OUTCOMES) == {"equal", "differs", "unanswered"}
