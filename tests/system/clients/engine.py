"""A double of vLLM's server with all endpoints that clients use: each answers in the form of its API.

Source: the OpenAI API reference (chat, completions, responses, embeddings), the Anthropic API reference (messages).
"""

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.system.integration.engine_doubles import VllmDouble

Answer = Callable[[dict[str, Any]], Any]
_USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
_TEXT = '{"a": "b"}'


def _chat(body: dict[str, Any]) -> Any:
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    if not body.get("stream"):
        message = {"role": "assistant", "content": _TEXT, "tool_calls": []}
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return head | {"object": "chat.completion", "choices": [choice], "usage": _USAGE}
    deltas = [{"role": "assistant", "content": ""}, {"content": _TEXT}]
    choices: list[list[dict[str, Any]]]
    choices = [[{"index": 0, "delta": each, "finish_reason": None}] for each in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    chunks = [head | {"object": "chat.completion.chunk", "choices": each} for each in choices]
    return [(None, each) for each in chunks] + [(None, None)]


def _completion(body: dict[str, Any]) -> Any:
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    choices = [{"index": at, "text": _TEXT, "finish_reason": "stop", "logprobs": None} for at in range(len(prompts))]
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"], "choices": choices}


def _response(body: dict[str, Any]) -> Any:
    text = {"type": "output_text", "text": _TEXT, "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": body["model"], "status": "completed",
        "output": [item], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _embeddings(body: dict[str, Any]) -> Any:
    inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
    vector: Any = "AACAPwAAgD8=" if body.get("encoding_format") == "base64" else [1.0, 1.0]
    data = [{"object": "embedding", "index": at, "embedding": vector} for at in range(len(inputs))]
    return {"object": "list", "model": body["model"], "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}


def _messages(body: dict[str, Any]) -> Any:
    usage = {"input_tokens": 3, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    text = {"type": "text", "text": _TEXT}
    if not body.get("stream"):
        return message | {"content": [text], "stop_reason": "end_turn", "usage": usage}
    begun = message | {"content": [], "stop_reason": None, "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _TEXT}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    return [(each["type"], each) for each in events]


ANSWERS: dict[str, Answer] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
    "/v1/messages": _messages,
    "/v1/rerank": lambda body: {"id": "rerank-1", "model": body["model"], "results": []},
}


class AllEndpoints(VllmDouble):
    """The double, whose `served_paths` are those of `ANSWERS`."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.requests.append((request.path, {}, data))
        answer = ANSWERS[request.path](json.loads(data))
        if not isinstance(answer, list):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for kind, event in answer:
            named = b"" if kind is None else b"event: %b\n" % kind.encode()
            await response.write(named + b"data: %b\n\n" % (b"[DONE]" if event is None else json.dumps(event).encode()))
        return response
