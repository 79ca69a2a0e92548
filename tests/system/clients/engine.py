"""Doubles of vLLM's and SGLang's servers with all endpoints that clients use: each answers in the form of its API.

Source: the OpenAI API reference (chat, completions, responses, embeddings), the Anthropic API reference (messages); for
SGLang sgl-project/sglang, `python/sglang/srt/entrypoints/openai/protocol.py` (`UsageInfo`, `DeltaMessage`,
`ChatCompletionStreamResponse`, `CompletionResponse`, `ResponsesResponse`) and `anthropic/serving.py` beside it.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.system.integration.engine_doubles import EngineDouble, SglangDouble, VllmDouble

Own = defaultdict[str, dict[str, Any]]
"""The fields that an engine has beside others', by the object that has them."""
Answer = Callable[[dict[str, Any], Own], Any]
VLLM = Own(dict, message={"stop_reason": None, "stop_sequence": None})
SGLANG = Own(
    dict,
    answer={"metadata": {"weight_version": "default"}},
    chunk={"usage": None},
    choice={"matched_stop": None},
    delta=dict.fromkeys(("role", "content", "reasoning_content", "tool_calls")),
    usage={"prompt_tokens_details": None, "reasoning_tokens": 0},
    response=dict.fromkeys(("error", "instructions", "max_output_tokens", "previous_response_id", "temperature"))
    | {"metadata": {}, "reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}}},
    message_usage={"cache_read_input_tokens": 0},
)
_USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
_TEXT = '{"a": "b"}'


def _chat(body: dict[str, Any], own: Own) -> Any:
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    choice = {"index": 0, "logprobs": None, "finish_reason": None, **own["choice"]}
    usage = _USAGE | own["usage"]
    if not body.get("stream"):
        said = choice | {"message": own["delta"] | {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}
        return head | {"object": "chat.completion", "choices": [said], "usage": usage, **own["answer"]}
    head |= {"object": "chat.completion.chunk", **own["chunk"]}
    deltas = [{"role": "assistant", "content": ""}, {"content": _TEXT}]
    choices: list[list[dict[str, Any]]] = [[choice | {"delta": own["delta"] | each}] for each in deltas]
    choices.append([choice | {"delta": own["delta"], "finish_reason": "stop"}])
    chunks = [head | {"choices": each} for each in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": usage})
    return [(None, each) for each in chunks] + [(None, None)]


def _completion(body: dict[str, Any], own: Own) -> Any:
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    choice = {"text": _TEXT, "finish_reason": "stop", "logprobs": None, **own["choice"]}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"], **own["answer"]}
    return head | {"choices": [choice | {"index": at} for at in range(len(prompts))], "usage": _USAGE | own["usage"]}


def _response(body: dict[str, Any], own: Own) -> Any:
    text = {"type": "output_text", "text": _TEXT, "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    begun = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": body["model"], "status": "in_progress",
        "output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": None, **own["response"],
    }  # fmt: skip
    usage = {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 4,
    }  # fmt: skip
    completed = begun | {"status": "completed", "output": [item], "usage": usage}
    if not body.get("stream"):
        return completed
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
        {"type": "response.output_text.delta", **place, "delta": _TEXT, "logprobs": []},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": completed},
    ]
    return [(each["type"], each | {"sequence_number": at}) for at, each in enumerate(events)]


def _embeddings(body: dict[str, Any], own: Own) -> Any:
    inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
    vector: Any = "AACAPwAAgD8=" if body.get("encoding_format") == "base64" else [1.0, 1.0]
    data = [{"object": "embedding", "index": at, "embedding": vector} for at in range(len(inputs))]
    usage = {"prompt_tokens": 1, "total_tokens": 1, **own["usage"]}
    return {"object": "list", "model": body["model"], "data": data, "usage": usage}


def _messages(body: dict[str, Any], own: Own) -> Any:
    usage = {"input_tokens": 3, "output_tokens": 1, **own["message_usage"]}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], **own["message"]}
    text = {"type": "text", "text": _TEXT}
    if not body.get("stream"):
        return message | {"content": [text], "stop_reason": "end_turn", "usage": usage}
    begun = message | {"content": [], "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _TEXT}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": own["message"] | {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]
    return [(each["type"], each) for each in events]


ANSWERS: dict[str, Answer] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
    "/v1/messages": _messages,
    "/v1/rerank": lambda body, _: {"id": "rerank-1", "model": body["model"], "results": []},
}


class AllEndpoints(EngineDouble):
    """A double, whose `served_paths` are those of `ANSWERS`."""

    own = VLLM

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.requests.append((request.path, {}, data))
        body = json.loads(data)
        if (refused := self.refusal(body)) is not None:
            return refused
        answer = ANSWERS[request.path](body, self.own)
        if not isinstance(answer, list):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for kind, event in answer:
            named = b"" if kind is None else b"event: %b\n" % kind.encode()
            await response.write(named + b"data: %b\n\n" % (b"[DONE]" if event is None else json.dumps(event).encode()))
        return response


class AllOfVllm(AllEndpoints, VllmDouble):
    pass


class AllOfSglang(AllEndpoints, SglangDouble):
    own = SGLANG


DOUBLES: dict[str, type[AllEndpoints]] = {"vllm": AllOfVllm, "sglang": AllOfSglang}
