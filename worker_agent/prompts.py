"""From a client's request to the prompt that its engine computes: token ids, and the media among them."""

import msgspec

from kv_protocol.openai import ChatRequest, Request
from kv_runtime.text import Text
from worker_agent.core.media import Media
from worker_agent.core.request_rules import prompt_ids


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and the media that they name, in their order."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()


class Prompts:
    """Prompts of one worker's requests."""

    def __init__(self, text: Text) -> None:
        self._text = text

    async def prompt(self, request: Request) -> Prompt:
        """Return the request's prompt; raise `RequestInvalid` or `TextError`, which name the field."""
        return Prompt(tokens=tuple(self._tokens(request)))

    def _tokens(self, request: Request) -> list[int]:
        if request.kv_prompt_ids is not None:
            return prompt_ids(request.kv_prompt_ids)
        if request.nvext is not None and (given := request.nvext.prompt_ids()) is not None:
            return given
        if isinstance(request, ChatRequest):
            return self._text.encode_chat(request.messages, **request.template_options)
        if not isinstance(request.prompt, str):
            return list(request.prompt)
        return self._text.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
