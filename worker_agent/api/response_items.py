"""Builds the output items of a response from the events of an answer, and the stream events of each item.

    of the answer         item             its events, after `output_item.added` and before `output_item.done`
    -------------------   --------------   -------------------------------------------------------------------------
    ContentDelta          message          content_part.added, output_text.delta .., output_text.done, content_part.done
    ReasoningDelta        reasoning        content_part.added, reasoning_text.delta .., reasoning_text.done,
                                           content_part.done
    ToolCallStarted and   function_call    function_call_arguments.delta .., function_call_arguments.done
    ToolCallArguments

One item is open at a time: another kind of event, or another call, closes it.
Source: the OpenAI API reference, "Responses: streaming events".
"""

from typing import Any, Literal, NamedTuple

from worker_agent.api.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallStarted

Kind = Literal["message", "reasoning", "function_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class StreamEvent(NamedTuple):
    """One event of a response's stream: its type without `response.`, and its fields."""

    type: str
    fields: dict[str, Any]


class _Open:
    """The item that is being filled."""

    def __init__(self, kind: Kind, item_id: str, index: int, call: ToolCallStarted | None) -> None:
        self.kind, self.call = kind, call
        self.item_fields: dict[str, Any] = {"item_id": item_id, "output_index": index}
        self.texts: list[str] = []

    def item(self, status: ItemStatus) -> dict[str, Any]:
        """Return the item; without content while it is in progress."""
        item: dict[str, Any] = {"id": self.item_fields["item_id"], "type": self.kind, "status": status}
        text = "".join(self.texts)
        if self.call is not None:
            return item | {"call_id": self.call.id, "name": self.call.name, "arguments": text}
        content: list[dict[str, Any]] = [] if status == "in_progress" else [self.part(text)]
        more: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return item | more | {"content": content}

    def part(self, text: str) -> dict[str, Any]:
        """Return its content part with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseItems:
    """The items of one response; `name` is part of their ids."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: _Open | None = None
        self.done: list[dict[str, Any]] = []
        """All closed items, in order."""

    def feed(self, event: Event) -> list[StreamEvent]:
        """Take the next event of the answer; return the events that it adds to the response's stream."""
        if isinstance(event, ToolCallStarted):
            return self.close() + self._opened("function_call", event)
        if isinstance(event, ToolCallArguments):
            assert self._open is not None, "a call begins before its arguments"
            return [self._more(self._open, "function_call_arguments", event.delta)]
        kind: Kind = "message" if isinstance(event, ContentDelta) else "reasoning"
        before: list[StreamEvent] = []
        if self._open is None or self._open.kind != kind:
            before = self.close() + self._opened(kind, None)
        assert self._open is not None
        return [*before, self._more(self._open, _TEXTS[kind], event.text)]

    def close(self, status: ItemStatus = "completed") -> list[StreamEvent]:
        """Return the stream events that close the open item; none if none is open."""
        last, self._open = self._open, None
        if last is None:
            return []
        item, text = last.item(status), "".join(last.texts)
        self.done.append(item)
        ended = StreamEvent("output_item.done", {"output_index": last.item_fields["output_index"], "item": item})
        if last.call is not None:
            done_fields = {**last.item_fields, "name": last.call.name, "arguments": text}
            return [StreamEvent("function_call_arguments.done", done_fields), ended]
        done_fields = {**last.item_fields, "content_index": 0, "text": text} | _logprobs(last.kind)
        part = {**last.item_fields, "content_index": 0, "part": last.part(text)}
        return [StreamEvent(f"{_TEXTS[last.kind]}.done", done_fields), StreamEvent("content_part.done", part), ended]

    def _opened(self, kind: Kind, call: ToolCallStarted | None) -> list[StreamEvent]:
        index = len(self.done)
        opened = self._open = _Open(kind, f"{_PREFIXES[kind]}_{self._name}{index}", index, call)
        events = [StreamEvent("output_item.added", {"output_index": index, "item": opened.item("in_progress")})]
        if call is None:
            part = {**opened.item_fields, "content_index": 0, "part": opened.part("")}
            events.append(StreamEvent("content_part.added", part))
        return events

    @staticmethod
    def _more(opened: _Open, what: str, delta: str) -> StreamEvent:
        opened.texts.append(delta)
        content = {} if opened.call is not None else {"content_index": 0} | _logprobs(opened.kind)
        return StreamEvent(f"{what}.delta", {**opened.item_fields, **content, "delta": delta})


_PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS: dict[Kind, str] = {"message": "output_text", "reasoning": "reasoning_text"}


def _logprobs(kind: Kind) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
