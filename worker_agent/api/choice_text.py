"""Turns one choice's tokens into text: decoded, cut at a stop string, with log probabilities.

    a token's text       the text that the detokenizer returns after the token
    a token without any  (half a character, a special token) goes with the next token that has text, or with the end
    a token is shown     with the piece that has the last of its text; if a stop string cuts it, with what is left of it
    after a stop string  no text and no token is shown
    the shown text       becomes events (`parsers/`): content, and, if the worker has parsers, reasoning and calls

Tokens are processed one by one, so that the result does not depend on how many came together.

Parsed tool calls are counted: `complete`, or `unclosed` if the answer ended within the call; its beginning was sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kv_protocol.openai.option_table import NamedToolChoice
from kv_protocol.openai.requests import ChatRequest, Request
from kv_runtime.text.model import Text
from worker_agent.api.parsers.calls import AnswerOptions, AnswerParser, ContentDelta, Event, joined
from worker_agent.api.parsers.families import AnswerFormat
from worker_agent.api.parsers.forced_calls import forced_calls
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Guide, TokenLogprobs
from worker_agent.port.types import EngineOutput

_PROMPT_END_TOKENS = 16
"""How many of the prompt's last tokens are read to see whether the template began the reasoning."""


class TokenSpan(NamedTuple):
    """A token whose text is passed on: its offset in the choice's text, in characters, and its log probabilities."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the answer from one output: text, its tokens, and at the end of a choice its finish reason."""

    choice: int = 0
    events: tuple[Event, ...] = ()
    """The text, as events."""
    spans: tuple[TokenSpan, ...] = ()
    finish_reason: str | None = None
    handoff: Handoff | None = None
    prompt: tuple[int, ...] = ()
    """The prompt as the engine computed it, if it differs from the request's; set with the finish reason."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry for each token of the prompt, if the request asks for them; set with the finish reason."""

    @property
    def content(self) -> str:
        """The text that is meant for the user."""
        return "".join(event.text for event in self.events if isinstance(event, ContentDelta))


class ChoiceText:
    """The text of one choice. `tokens` counts its tokens, up to the one that completed a stop string."""

    def __init__(
        self,
        choice: int,
        text: Text,
        stops: tuple[str, ...],
        parser: AnswerParser,
        *,
        with_logprobs: bool,
    ) -> None:
        self._choice, self._detokenizer = choice, text.detokenizer(parser.shown_tokens)
        self._filter, self._with_logprobs, self.parser = StopFilter(stops), with_logprobs, parser
        self._groups = deque[list[TokenSpan]]()  # tokens that were not shown yet; a group's tokens share their text
        self._decoded = self._shown = 0  # characters
        self.tokens = 0
        self.is_over = False

    def resume(self, token_ids: Sequence[int]) -> None:
        """Process tokens that another worker has shown already; text at their end that was withheld stays withheld."""
        self.push(EngineOutput(token_ids=tuple(token_ids), cached_tokens=0))

    def push(self, output: EngineOutput) -> Piece:
        """Return the piece of `output`; an empty one once the choice is over."""
        if self.is_over:
            return Piece(choice=self._choice)
        shown = self._text_of(output)
        if output.finish_reason is not None and not self._filter.stopped:
            rest = self._detokenizer.flush()
            self._decoded += len(rest)
            shown += self._filter.push(rest) + self._filter.flush()
        reason: str | None = "stop" if self._filter.stopped else output.finish_reason
        self.is_over = reason is not None
        self._shown += len(shown)
        spans = self._shown_spans()
        events = self.parser.feed(shown)
        if reason is not None:
            events, reason = joined(events + self.parser.finish()), self.parser.finish_reason(reason)
        return Piece(
            choice=self._choice, events=tuple(events), spans=spans, finish_reason=reason, handoff=output.handoff
        )

    def _text_of(self, output: EngineOutput) -> str:
        shown = ""
        for at, token in enumerate(output.token_ids):
            self.tokens += 1
            text = self._detokenizer.push((token,))
            if self._with_logprobs:
                if not self._groups or self._groups[-1][0].start < self._decoded:
                    self._groups.append([])
                logprobs = output.logprobs[at] if at < len(output.logprobs) else None
                self._groups[-1].append(TokenSpan(token, self._decoded, logprobs))
            self._decoded += len(text)
            shown += self._filter.push(text)
            if self._filter.stopped:
                break
        return shown

    def _shown_spans(self) -> tuple[TokenSpan, ...]:
        """Take and return the tokens that are shown now; at a cut also a partly shown group, at the end all."""
        spans: list[TokenSpan] = []
        while self._groups:
            start = self._groups[0][0].start
            end = self._groups[1][0].start if len(self._groups) > 1 else self._decoded
            is_last = start < self._shown if self._filter.stopped else self.is_over
            if not (start < end <= self._shown or is_last):
                break
            spans += self._groups.popleft()
        return tuple(spans)


class StopFilter:
    """Passes text up to the stop string that ends first (the longest, if several do), as if it came letter by letter.

    A possible beginning of a stop string is withheld, so that the cut does not depend on the chunks.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the part of `text` and of the withheld text that may be shown."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return the withheld text, after the last chunk."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


# ---------------------------------------------------------------- parsers
class AnswerParsing:
    """Builds parsers, and counts the calls that they found."""

    def __init__(self, answer_format: AnswerFormat, text: Text) -> None:
        self._format, self._text = answer_format, text
        self.tool_calls_total = {"complete": 0, "unclosed": 0}
        self.stop_tokens = {text.special_ids[name] for name in answer_format.stop_tokens if name in text.special_ids}
        """The ids of tokens that end answers in this format."""

    def parser_of(self, request: Request, prompt: tuple[int, ...], answer_id: str) -> Callable[[int], AnswerParser]:
        """Return a function that builds the parser of each choice of the answer. A completion's text is content."""
        if not isinstance(request, ChatRequest):
            return lambda _: AnswerParser(answer_id, AnswerOptions())
        end = self._prompt_end(prompt)
        wishes = AnswerOptions(
            tools=() if request.tool_choice == "none" else tuple(request.tools or ()),
            only_first_call=request.parallel_tool_calls is False,
            keeps_reasoning=request.include_reasoning is not False,
        )
        return lambda choice: self._format.parser(wishes, f"{answer_id}/{choice}", prompt_end=end)

    def forced_guide(self, request: Request, prompt: tuple[int, ...], handoff: Handoff | None = None) -> Guide | None:
        """Return the guide with which the engine writes the calls that `tool_choice` demands; None if there is none.

        `handoff` has the answer's first tokens, if a prefill worker generated them.
        """
        if not isinstance(request, ChatRequest) or request.tool_choice in (None, "none", "auto"):
            return None
        functions, only_one = tuple(request.tools or ()), request.parallel_tool_calls is False
        if isinstance(request.tool_choice, NamedToolChoice):
            name, only_one = request.tool_choice.function.name, True
            functions = tuple(each for each in functions if each["function"]["name"] == name)
        options, end = AnswerOptions(tools=functions, only_first_call=only_one), self._prompt_end(prompt)
        parser = self._format.parser(options, prompt_end=end)
        tag = forced_calls(parser, begun=self._decoded((handoff and handoff.first_gen_tokens) or ()))
        return None if tag is None else Guide(kind="structural_tag", value=msgspec.json.encode(tag).decode())

    def count(self, parsers: Sequence[AnswerParser]) -> None:
        """Count the calls of an answer that has ended."""
        for parser in parsers:
            self.tool_calls_total["unclosed"] += parser.has_open_call
            self.tool_calls_total["complete"] += max(0, parser.calls - parser.has_open_call)

    def _prompt_end(self, prompt: tuple[int, ...]) -> str:
        return self._decoded(prompt[-_PROMPT_END_TOKENS:])

    def _decoded(self, tokens: tuple[int, ...]) -> str:
        detokenizer = self._text.detokenizer(self._format.special_tokens)
        return detokenizer.push(tokens) + detokenizer.flush()
