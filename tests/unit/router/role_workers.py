"""Workers of every role, scripted: they speak TensorRT-LLM's handoffs and go on with streams that began elsewhere.

The model is a pure one: the n-th token after a prompt is the letter that `letter(prompt, n)` gives. So every way
through the fleet has to end in the same text.
"""

import base64
import json
from typing import TYPE_CHECKING, Any

from kv_protocol.continuation import Continuation, token_comment
from kv_protocol.hashing import unpack_tokens
from tests.unit.router.upstream import DONE, Exchange, Script, chunked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LETTERS = b"abcdefghij"
END = "stop"


def letter(prompt: list[int], at: int) -> int:
    """Return the token that stands `at` places behind the prompt."""
    return LETTERS[(sum(prompt) + at * at) % len(LETTERS)]


def text_of(prompt: list[int], count: int) -> str:
    """Return the whole answer of so many tokens."""
    return "".join(chr(letter(prompt, at)) for at in range(count))


class RoleWorker:
    """One worker. `cut_after` tokens its next stream is cut; `fault` answers the next request instead, both once.

    `stays_after` tokens a stream stays where it is until the client leaves.
    """

    def __init__(self, role: str = "aggregated", name: str = "w0") -> None:
        self.role, self.name = role, name
        self.fault: Script | None = None
        self.cut_after: int | None = None
        self.stays_after: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.fetched: list[int] = []
        """Transfers that a decode worker took."""
        self.waits: Callable[[], Awaitable[None]] | None = None
        self.is_final = False
        self._transfers = 0

    async def __call__(self, exchange: Exchange) -> None:
        received = exchange.received
        body = json.loads(received.body)
        self.bodies.append(body)
        fault, self.fault = self.fault, None
        if fault is not None:
            await fault(exchange)
            return
        if self.waits is not None:
            await self.waits()
        prompt = unpack_tokens(base64.b64decode(body["kv_prompt_ids"]))
        if self.role == "prefill":
            await self._prefill(exchange, prompt, body)
            return
        params = body.get("disaggregated_params", {})
        if self.role == "decode" and params.get("request_type") == "generation_only":
            self.fetched.append(params["ctx_request_id"])
            assert params["first_gen_tokens"] == [letter(prompt, len(_so_far(body)))]
        elif self.role == "decode":
            assert params == {"request_type": "context_and_generation"}
        await self._generate(exchange, prompt, body, tells="x-kv-continuable" in received.headers)

    async def _prefill(self, exchange: Exchange, prompt: list[int], body: dict[str, Any]) -> None:
        assert (body["stream"], body["max_tokens"]) == (False, 1)
        assert body["disaggregated_params"] == {"request_type": "context_only"}
        self._transfers += 1
        at = len(_so_far(body))
        first = letter(prompt, at)
        params: dict[str, Any] = {
            "request_type": "context_only",
            "first_gen_tokens": [first],
            "ctx_request_id": self._transfers,
        }
        params["ctx_info_endpoint"] = self.name
        choice = {"index": 0, "text": chr(first), "finish_reason": END if self.is_final else "length"}
        answer = _head(body, "cmpl-p") | {"object": "text_completion", "usage": _usage(prompt, at + 1)}
        answer["choices"] = [choice | {"disaggregated_params": params}]
        await exchange.answer(body=json.dumps(answer).encode())

    async def _generate(self, exchange: Exchange, prompt: list[int], body: dict[str, Any], *, tells: bool) -> None:
        done, count = _so_far(body), body["max_tokens"]
        head, usage = _head(body, "cmpl-w"), _usage(prompt, count)
        assert done == [letter(prompt, at) for at in range(len(done))]
        if not body.get("stream"):
            choice = {"index": 0, "text": text_of(prompt, count), "finish_reason": "length"}
            await exchange.answer(body=json.dumps(head | {"choices": [choice], "usage": usage}).encode())
            return
        await exchange.head(transfer_encoding="chunked")
        cut_after, self.cut_after = self.cut_after, None
        for sent, at in enumerate(range(len(done), count)):
            if sent == cut_after:
                break
            if sent == self.stays_after:
                await exchange.until_gone()
                return
            token = letter(prompt, at)
            comment = token_comment([token]) if tells else b""
            choice = {"index": 0, "text": chr(token), "finish_reason": None}
            await exchange.send(chunked(comment + _event(head | {"choices": [choice]})))
        if cut_after is not None:
            await exchange.cut()
            return
        ending = _event(head | {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        ending += _event(head | {"choices": [], "usage": usage})
        await exchange.send(chunked(ending + DONE) + b"0\r\n\r\n")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _head(body: dict[str, Any], name: str) -> dict[str, Any]:
    told = body.get("kv_continue")
    return {"id": name, "created": 7} if told is None else {"id": told["id"], "created": told["created"]}


def _usage(prompt: list[int], tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": 0}
    return {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": details}


def _so_far(body: dict[str, Any]) -> list[int]:
    told = body.get("kv_continue")
    return [] if told is None else Continuation(**told).token_ids()


def streamed_text(body: bytes, usages: tuple[int, ...] = (1,)) -> str:
    """Return the text of a stream that ended as a whole one does: one name, one usage, and the mark of its end."""
    assert body.endswith(DONE)
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert not [event for event in events if "error" in event]
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert len([event for event in events if event.get("usage")]) in usages
    return "".join(choice["text"] for event in events for choice in event["choices"])
