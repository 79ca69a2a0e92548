"""Checks of options that are valid alone and invalid together.

min_tokens                  at most the limit of the response's tokens
top_logprobs                with `logprobs: true`
tool_choice "required"      with `tools`
tool_choice of a function   one of `tools`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kv_protocol.errors import shortened
from kv_protocol.openai.errors import RequestInvalid
from kv_protocol.openai.option_table import NamedToolChoice, Tool, ToolChoice
from kv_protocol.openai.parts import OptionalPart

if TYPE_CHECKING:
    from kv_protocol.openai.requests import ChatRequest, CompletionRequest

_NAMES_CHARACTERS_MAX = 200
_tools = OptionalPart[list[Tool]](list[Tool])


def check_chat(chat: "ChatRequest") -> None:
    """Check that the options are compatible, and that tools are functions with names; raise `RequestInvalid`."""
    names = [tool.function.name for tool in _tools.read(msgspec.Raw(msgspec.json.encode(chat.tools)), "tools") or ()]
    check_min_tokens(chat)
    if chat.top_logprobs and not chat.logprobs:
        raise RequestInvalid("top_logprobs", chat.top_logprobs, "none without logprobs: true")
    if chat.tool_choice not in (None, "none", "auto"):
        _check_choice(chat.tool_choice, names)


def check_min_tokens(request: "ChatRequest | CompletionRequest") -> None:
    """Check that `min_tokens` is within the limit of the response's tokens; raise `RequestInvalid` otherwise."""
    limit = request.limit_tokens
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise RequestInvalid("min_tokens", request.min_tokens, f"0..{limit}: the limit of the answer's tokens")


def _check_choice(choice: ToolChoice | None, names: Sequence[str]) -> None:
    if choice == "required" and not names:
        raise RequestInvalid("tool_choice", choice, '"none" or "auto": there are no tools')
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        known = shortened(", ".join(names) or "there are none", _NAMES_CHARACTERS_MAX)
        raise RequestInvalid("tool_choice.function.name", choice.function.name, f"the name of one of tools ({known})")
