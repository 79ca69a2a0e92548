"""From a client's request to the prompt that its engine computes: token ids, and the media among them.

computed by another worker    as that one says, media and all: nothing is rendered or loaded
a chat with media             `media/chats.py`
`kv_prompt_ids`               the router's, of the same text
`nvext.token_data`            the client's
any other                     rendered, and tokenized
"""

from collections.abc import Sequence

import msgspec

from kv_protocol.openai import ChatRequest, Request
from kv_runtime.text import Text
from worker_agent.core.disaggregated import Handoff
from worker_agent.core.media import Media, names_media
from worker_agent.core.media_refusals import MediaRefused
from worker_agent.core.request_rules import prompt_ids
from worker_agent.media.chats import ChatMedia


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and the media that they name, in their order: fields of an `EngineRequest` of the same names.

    `text` is the prompt before it was tokenized, where it has media. `handoff` has them where an encode worker does.
    """

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()
    text: str | None = None
    handoff: Handoff | None = None


class Prompts:
    """Prompts of one worker's requests; without `media` it takes text alone."""

    def __init__(self, text: Text, media: ChatMedia | None = None) -> None:
        self._text, self._media = text, media

    async def prompt(self, request: Request, *, computed: Sequence[int] | None = None) -> Prompt:
        """Return the request's prompt; `computed` is the one that another worker has computed for it.

        Raises:
            RequestInvalid, TextError: which name the field. `MediaRefused` is one.
            EncoderUnavailable: the encode worker that is asked does not answer.
        """
        if computed is not None:
            return Prompt(tokens=tuple(computed))
        if isinstance(request, ChatRequest):
            chat = await self._with_media(request)
            if chat is not None:
                return chat
        tokens = self._tokens(request)
        if self._media is not None:
            self._media.check(tokens, 0, "messages" if isinstance(request, ChatRequest) else "prompt")
        return Prompt(tokens=tuple(tokens))

    async def _with_media(self, request: ChatRequest) -> Prompt | None:
        if self._media is None:
            if names_media(request.messages):
                raise MediaRefused(
                    "text_only", "messages", "parts that are not text", "text: the worker takes no media"
                )
            return None
        chat = await self._media.prompt(request)
        if chat is None:
            return None
        became = chat.media
        return Prompt(tokens=tuple(chat.tokens), text=chat.text, media=became.media, handoff=became.handoff)

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
