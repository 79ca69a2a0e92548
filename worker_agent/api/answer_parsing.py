"""Chooses an answer's parsers, its special tokens and its guide, and counts the tool calls that are found.

counted as    a tool call
complete      that ended
unclosed      that the answer's end cut off; its part was sent
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from kv_protocol.openai.option_table import NamedToolChoice
from kv_protocol.openai.requests import ChatRequest, Request
from kv_runtime.text.model import Text
from worker_agent.api.parsers.calls import AnswerOptions
from worker_agent.api.parsers.families import AnswerFormat, AnswerParser
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Guide

_PROMPT_END_TOKENS = 16
"""How many of the prompt's last tokens are read to see whether the template began the reasoning."""

Ending = Literal["complete", "unclosed"]
ENDINGS: tuple[Ending, ...] = ("complete", "unclosed")


class AnswerParsing:
    """Builds parsers, and counts the calls that they found. Without parsers all text is content."""

    def __init__(self, answer_format: AnswerFormat, text: Text) -> None:
        self._format, self._text = answer_format, text
        self.tool_calls_total = Counter[Ending]()

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """The special tokens that the parsers must see."""
        return self._format.special_tokens

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The ids of tokens that end answers in this format."""
        ids = (self._text.special_ids.get(name) for name in self._format.stop_tokens)
        return frozenset(token for token in ids if token is not None)

    def parser_of(
        self, request: Request, prompt: tuple[int, ...], answer_id: str
    ) -> Callable[[int], AnswerParser | None]:
        """Return a function that builds the parser of each choice of the answer."""
        if not self._format.parses or not isinstance(request, ChatRequest):
            return lambda _: None
        wishes, end = _wishes(request), self._prompt_end(prompt)
        return lambda choice: self._format.parser(wishes, answer_id=answer_id, choice=choice, prompt_end=end)

    def forced_guide(self, request: Request, prompt: tuple[int, ...], handoff: Handoff | None = None) -> Guide | None:
        """Return what makes the engine write the calls that `tool_choice` demands; None where nothing does.

        `handoff` has the answer's first tokens, if a prefill worker generated them.
        """
        if not isinstance(request, ChatRequest) or request.tool_choice in (None, "none", "auto"):
            return None
        functions, only_one = tuple(request.tools or ()), request.parallel_tool_calls is False
        if isinstance(request.tool_choice, NamedToolChoice):
            name, only_one = request.tool_choice.function.name, True
            functions = tuple(each for each in functions if each["function"]["name"] == name)
        begun = self._decoded((handoff and handoff.first_gen_tokens) or ())
        tag = self._format.forced(functions, only_one=only_one, prompt_end=self._prompt_end(prompt), begun=begun)
        return None if tag is None else Guide(kind="structural_tag", value=tag)

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


def _wishes(request: ChatRequest) -> AnswerOptions:
    finds_calls = bool(request.tools) and request.tool_choice != "none"
    return AnswerOptions(
        finds_calls=finds_calls,
        tools=tuple(request.tools or ()) if finds_calls else (),
        only_first_call=request.parallel_tool_calls is False,
        keeps_reasoning=request.include_reasoning is not False,
    )
