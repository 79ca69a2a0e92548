"""Renders events of answer parsers as OpenAI chat clients read them.

    delta      {content, reasoning_content, tool_calls: [{index, id, type, function: {name, arguments}}]}: only keys
               with a value. Only a call's first delta has `id`, `type` and `name`
    message    {role, content, refusal, reasoning_content, tool_calls: [{id, type, function: {name, arguments}}]}: the
               last two only with a value; empty content beside them is null

`reasoning_content` is TensorRT-LLM's and SGLang's name; vLLM had it too, and now has `reasoning`.
Source: the OpenAI interface (chat completion chunk); NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/openai_protocol.py`;
vllm-project/vllm, `docs/features/reasoning_outputs.md`.
"""

from collections.abc import Sequence
from typing import Any

from worker_agent.api.parsers.events import ContentDelta, Event, ReasoningDelta, ToolCallStarted


def delta_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return a chunk's delta; without events that of an empty text."""
    content, reasoning = _texts(events)
    calls = [{"index": index, **call} for index, call in _calls(events).items()]
    parts = {"content": content, "reasoning_content": reasoning, "tool_calls": calls}
    return {name: part for name, part in parts.items() if part} or {"content": ""}


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return an unstreamed answer's message."""
    content, reasoning = _texts(events)
    parts = {"reasoning_content": reasoning, "tool_calls": list(_calls(events).values())}
    others = {name: part for name, part in parts.items() if part}
    return {"role": "assistant", "content": content or (None if others else ""), "refusal": None, **others}


def _texts(events: Sequence[Event]) -> tuple[str, str]:
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    return content, "".join(event.text for event in events if isinstance(event, ReasoningDelta))


def _calls(events: Sequence[Event]) -> dict[int, dict[str, Any]]:
    """Return the delta of each call, by its index."""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, ToolCallStarted):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": event.id, "type": "function", "function": function}
        elif not isinstance(event, ContentDelta | ReasoningDelta):
            call = calls.setdefault(event.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += event.delta
    return calls
