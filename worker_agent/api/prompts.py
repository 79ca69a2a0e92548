"""Turns a request into the prompt that the engine computes: token ids, and media among them.

computed by another worker    that worker's prompt with its media: nothing is rendered or loaded
a chat with media             `worker_agent/media/chats.py`
`kv_prompt_ids`               the router's, of the same text
`nvext.token_data`            the client's
any other                     rendered, and tokenized; a completion may have several
"""

from functools import partial

from kv_protocol.body_limits import Body
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.requests import ChatRequest, Request, RequestInvalid, is_given
from kv_runtime.text.model import Text
from worker_agent.api.bodies import worked
from worker_agent.api.request_rules import prompt_field, prompt_ids
from worker_agent.media.chats import NO_IMAGES, ChatMedia, EnginePrompt

TOKENS_MAX = 1 << 30
_OFF_LOOP_BYTES = 4 << 10
"""The prompt of a longer body is built on a thread: a tokenizer may take 2 ms for so much text."""
_SLICE = 256 << 10
_TOKEN_BYTES = 4


class EnginePrompts:
    """Prompts of one worker's requests."""

    def __init__(self, text: Text, media: ChatMedia) -> None:
        self._text, self._media = text, media

    async def prompts(
        self, request: Request, *, body: Body = NO_IMAGES, tokens_max: int = TOKENS_MAX
    ) -> list[EnginePrompt]:
        """Return the request's prompts, each of `tokens_max` tokens at most; `body` has the images that are cut out.

        Raises:
            RequestInvalid, TextError: they name the field; `MediaRefused` is one of them.
            EncoderUnavailable: the encode worker does not answer.
        """
        is_long = len(body.text) > _OFF_LOOP_BYTES
        if isinstance(request, ChatRequest):
            if is_given(request.prompt_token_ids):
                work = partial(_tokens, request.computed_ids() or b"", "prompt_token_ids", tokens_max)
                return [EnginePrompt(tokens=await worked(is_long, work))]
            chat = await self._media.prompt(request, body)
            if chat is not None:
                return [chat]
        field = prompt_field(request)
        prompts = await worked(is_long, lambda: [_tokens(each, field, tokens_max) for each in self._packed(request)])
        for tokens in prompts:
            self._media.check(tokens, 0, field)
        return [EnginePrompt(tokens=tokens) for tokens in prompts]

    def _packed(self, request: Request) -> list[bytes]:
        if request.kv_prompt_ids is not None:
            return [prompt_ids(request.kv_prompt_ids)]
        if request.nvext is not None and (token_ids := request.nvext.prompt_ids()) is not None:
            return [token_ids]
        if isinstance(request, ChatRequest):
            return [self._text.pack_chat(request.messages, **request.template_options)]
        adds = request.add_special_tokens is not False
        return [
            each if isinstance(each, bytes) else self._text.pack(each, add_special_tokens=adds)
            for each in request.read_prompts()
        ]


def _tokens(packed: bytes, field: str, tokens_max: int) -> tuple[int, ...]:
    """Return packed ids as numbers, in calls short enough not to block the event loop's thread."""
    count = len(packed) // _TOKEN_BYTES
    if count > tokens_max:
        raise RequestInvalid(field, f"{count} tokens", f"at most {tokens_max} tokens")
    ids: list[int] = []
    for at in range(0, len(packed), _SLICE):
        ids += unpack_tokens(packed[at : at + _SLICE])
    return tuple(ids)
