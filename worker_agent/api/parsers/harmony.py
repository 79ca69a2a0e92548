"""gpt-oss: the harmony format. Its messages have a channel and may have a recipient.

    [<|start|>assistant [to=RECIPIENT]] [<|channel|>CHANNEL [to=RECIPIENT]] [<|constrain|>TYPE] <|message|> TEXT
    <|end|>, <|call|> or <|return|>

    a message                                    is
    with a recipient                             a call, if calls are parsed; "functions." is not part of its name
    on the channel analysis                      reasoning
    on any other, as final and commentary        content

A second message of a kind begins on a new line. Text outside of messages is content, without the special tokens.
Source: openai/harmony, `docs/format.md`; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/harmony_adapter.py`;
sgl-project/sglang, `python/sglang/srt/function_call/gpt_oss_detector.py`.
"""

import re

from worker_agent.api.parsers.calls import CallId, ToolParser
from worker_agent.api.parsers.events import ReasoningDelta
from worker_agent.api.parsers.reader import Rejected, Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MESSAGE_ENDS = (_END, _CALL, _RETURN)
_ENDS = (*_MESSAGE_ENDS, _START)
_HEADER_CHARACTERS_MAX = 1024
_NO_MARKER = ("assistant", "to=")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


class HarmonyParser(ToolParser):
    """Reads messages. Without `finds_calls` those with a recipient are content."""

    markers = (_START, _CHANNEL, _MESSAGE, *_MESSAGE_ENDS)
    special_tokens = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
    stop_tokens = (_CALL, _RETURN)

    def __init__(self, call_id: CallId, *, finds_calls: bool = True) -> None:
        self._finds_calls = finds_calls
        self._shown: set[str] = set()
        super().__init__(call_id)

    def _steps(self) -> Steps[None]:
        while (yield from self._reader.peek()).isspace():
            self._content(self._reader.take())
        if begun := (yield from self._reader.literal(*_NO_MARKER)):  # the prompt said `<|start|>`, or more
            yield from self._tried(begun)
        yield from super()._steps()

    def _markers_now(self) -> tuple[str, ...]:
        return self.markers

    def _call(self, marker: str) -> Steps[None]:
        while marker and marker not in _MESSAGE_ENDS:
            header = yield from self._header(marker)
            if header is None:
                return
            recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
            if recipient and self._finds_calls and super()._markers_now():
                self._start(recipient[1].removeprefix("functions."))
                marker = yield from self._reader.until(_ENDS, self._arguments)
                self.has_open_call = not marker
            else:
                is_reasoning = not recipient and channel is not None and channel[1] == "analysis"
                marker = yield from self._text("reasoning" if is_reasoning else "content")

    def _header(self, marker: str) -> Steps[str | None]:
        """Return what stands before <|message|>; None where the answer ends within it."""
        self._reader.record(marker)
        if marker != _MESSAGE:
            try:
                yield from self._reader.before((_MESSAGE,), _HEADER_CHARACTERS_MAX)
            except Rejected:
                if marker in _NO_MARKER or not self._reader.ended:
                    raise
                self.has_open_call = bool(_RECIPIENT.search(self._reader.recorded()))
                return None
        return self._reader.recorded()

    def _text(self, kind: str) -> Steps[str]:
        """Show a message's text; return the marker behind it."""
        show = self._reasoning if kind == "reasoning" else self._content

        def on_new_line(text: str) -> None:
            if kind in self._shown and not lines:
                lines.append(kind)
                show("\n")
            show(text)

        lines: list[str] = []
        marker = yield from self._reader.until(_ENDS, on_new_line)
        self._shown.add(kind)
        return marker

    def _reasoning(self, text: str) -> None:
        self._events.append(ReasoningDelta(text))
