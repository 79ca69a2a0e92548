"""Turns a request into the prompt that the engine computes: token ids, and media among them.

computed by another worker    that worker's prompt with its media: nothing is rendered or loaded
a chat with media             `worker_agent/media/chats.py`
`kv_prompt_ids`               the router's, of the same text
`nvext.token_data`            the client's
any other                     rendered, and tokenized
"""

from functools import partial

import msgspec

from kv_protocol.body_limits import Body
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.requests import ChatRequest, Request, RequestInvalid, is_given
from kv_runtime.text.model import Text
from worker_agent.api.bodies import worked
from worker_agent.api.disaggregated import Handoff
from worker_agent.api.request_rules import prompt_field, prompt_ids
from worker_agent.media.chats import NO_IMAGES, ChatMedia
from worker_agent.media.parts import Media, names_media
from worker_agent.media.refusals import MediaRefused

TOKENS_MAX = 1 << 30
_OFF_LOOP_BYTES = 4 << 10
"""The prompt of a longer body is built on a thread: a tokenizer may take 2 ms for so much text."""
_SLICE = 256 << 10
_TOKEN_BYTES = 4


class EnginePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and the prompt's media, in their order: the fields of these names of an `EngineRequest`.

    `text` is the prompt before tokenization, if it has media. `handoff` has the media if an encode worker encoded them.
    """

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()
    text: str | None = None
    handoff: Handoff | None = None


class EnginePrompts:
    """Prompts of one worker's requests; without `media` it accepts only text."""

    def __init__(self, text: Text, media: ChatMedia | None = None) -> None:
        self._text, self._media = text, media

    async def prompt(self, request: Request, *, body: Body = NO_IMAGES, tokens_max: int = TOKENS_MAX) -> EnginePrompt:
        """Return the request's prompt, of `tokens_max` tokens at most; `body` has the images that are cut out of it.

        Raises:
            RequestInvalid, TextError: they name the field; `MediaRefused` is one of them.
            EncoderUnavailable: the encode worker does not answer.
        """
        is_long = len(body.text) > _OFF_LOOP_BYTES
        if isinstance(request, ChatRequest):
            if is_given(request.prompt_token_ids):
                work = partial(_tokens, request.computed_ids() or b"", "prompt_token_ids", tokens_max)
                return EnginePrompt(tokens=await worked(is_long, work))
            chat = await self._with_media(request, body)
            if chat is not None:
                return chat
        tokens = await worked(is_long, lambda: _tokens(self._packed(request), prompt_field(request), tokens_max))
        if self._media is not None:
            self._media.check(tokens, 0, prompt_field(request))
        return EnginePrompt(tokens=tokens)

    async def _with_media(self, request: ChatRequest, body: Body) -> EnginePrompt | None:
        if self._media is None:
            if names_media(request.messages):
                raise MediaRefused(
                    "text_only", "messages", "parts that are not text", "text: the worker takes no media"
                )
            return None
        chat = await self._media.prompt(request, body)
        if chat is None:
            return None
        became = chat.media
        return EnginePrompt(tokens=tuple(chat.tokens), text=chat.text, media=became.media, handoff=became.handoff)

    def _packed(self, request: Request) -> bytes:
        if request.kv_prompt_ids is not None:
            return prompt_ids(request.kv_prompt_ids)
        if request.nvext is not None and (token_ids := request.nvext.prompt_ids()) is not None:
            return token_ids
        if isinstance(request, ChatRequest):
            return self._text.pack_chat(request.messages, **request.template_options)
        prompt = request.read_prompt()
        if isinstance(prompt, bytes):
            return prompt
        return self._text.pack(prompt, add_special_tokens=request.add_special_tokens is not False)


def _tokens(packed: bytes, field: str, tokens_max: int) -> tuple[int, ...]:
    """Return packed ids as numbers, in calls short enough not to block the event loop's thread."""
    count = len(packed) // _TOKEN_BYTES
    if count > tokens_max:
        raise RequestInvalid(field, f"{count} tokens", f"at most {tokens_max} tokens")
    ids: list[int] = []
    for at in range(0, len(packed), _SLICE):
        ids += unpack_tokens(packed[at : at + _SLICE])
    return tuple(ids)
