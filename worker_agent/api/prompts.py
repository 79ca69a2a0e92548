"""Turns a request into the prompt that the engine computes: token ids, and media among them.

computed by another worker    that worker's prompt with its media: nothing is rendered or loaded
a chat with media             rendered here, with a placeholder an item, tokenized, counted; the media are loaded, or
                              an encode worker's handles or embeddings replace them. `kv_prompt_ids` were computed
                              without the images, and are ignored; `nvext.token_data` is ambiguous, and refused
`kv_prompt_ids`               the router's token ids of the same text
`nvext.token_data`            the client's token ids
any other                     rendered, and tokenized; a completion may have several prompts

the model takes no images     a part that is not text is refused (`text_only`)
it takes images               further image tokens are refused (`placeholder`): they would get features of no image
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from kv_protocol.body_limits import Body
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.requests import ChatRequest, Request, RequestInvalid, is_given
from kv_runtime.text.model import Text
from worker_agent.api.bodies import worked
from worker_agent.api.request_rules import NOTHING_ASKED, prompt_field
from worker_agent.media.encode_client import EncodeClient
from worker_agent.media.image_models import ImageFacts
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import MediaChat, MediaPart, names_media, split_chat
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import EngineRequest

NO_IMAGES = Body(b"")
_OFF_LOOP_BYTES = 4 << 10
"""The prompt of a longer body is built on a thread: a tokenizer may take 2 ms for this much text."""
_SLICE = 256 << 10
_TOKEN_BYTES = 4


class EnginePrompts:
    """Prompts of one worker's requests. `facts` None: its model takes no images; `encoder` None: the engine encodes."""

    def __init__(
        self, text: Text, loader: MediaLoader, facts: ImageFacts | None, encoder: EncodeClient | None = None
    ) -> None:
        self._text, self._loader, self._facts, self._encoder = text, loader, facts, encoder

    async def prompts(
        self, request: Request, wishes: EngineRequest = NOTHING_ASKED, body: Body = NO_IMAGES
    ) -> list[EngineRequest]:
        """Return the wishes with each of the request's prompts, whose length is not checked here, and its media.

        If an encode worker encoded the media, they are in the handoff. `body` has the images that are cut out.

        Raises:
            RequestInvalid, TextError: they name the field; `MediaRefused` is one of them.
            EncoderUnavailable: the encode worker does not answer.
        """
        try:
            return await self._prompts(request, wishes, body)
        except MediaRefused as refused:
            self._loader.refused_total[refused.reason] += 1
            raise

    async def _prompts(self, request: Request, wishes: EngineRequest, body: Body) -> list[EngineRequest]:
        is_long = len(body.text) > _OFF_LOOP_BYTES
        if isinstance(request, ChatRequest):
            if is_given(request.prompt_token_ids):
                work = partial(_tokens, request.computed_ids() or b"")
                return [replace(wishes, prompt=await worked(is_long, work))]
            if names_media(request.messages):
                if self._facts is None:
                    allowed = "text: the model takes no media"
                    raise MediaRefused("text_only", "messages", "parts that are not text", allowed)
                split = split_chat(request.messages, self._facts.placeholder)
                return [await self._with_media(request, wishes, split, body)]
        prompts = await worked(is_long, lambda: [_tokens(each) for each in self._packed(request)])
        for tokens in prompts:
            self._check(tokens, 0, prompt_field(request))
        return [replace(wishes, prompt=tokens) for tokens in prompts]

    def _packed(self, request: Request) -> list[bytes]:
        if (ids := request.kv_prompt_ids) is not None:
            if not ids or len(ids) % _TOKEN_BYTES:
                raise RequestInvalid("kv_prompt_ids", f"{len(ids)} bytes", "one or more little-endian u32s")
            return [ids]
        if request.nvext is not None and (token_ids := request.nvext.prompt_ids()) is not None:
            return [token_ids]
        if isinstance(request, ChatRequest):
            return [self._text.pack_chat(request.messages, **request.template_options)]
        adds = request.add_special_tokens is not False
        return [
            each if isinstance(each, bytes) else self._text.pack(each, add_special_tokens=adds)
            for each in request.read_prompts()
        ]

    async def _with_media(
        self, request: ChatRequest, wishes: EngineRequest, split: MediaChat, body: Body
    ) -> EngineRequest:
        """Return the prompt of a chat with media, one image token an item."""
        if request.nvext is not None and request.nvext.prompt_ids() is not None:
            raise RequestInvalid("nvext.token_data", "token ids beside media", "either of them")
        rendered = await asyncio.to_thread(self._text.render_chat, split.messages, **request.template_options)
        tokens = await asyncio.to_thread(self._text.encode, rendered, add_special_tokens=False)
        self._check(tokens, len(split.parts), "messages")

        def read() -> list[MediaPart]:
            return [replace(each, base64=body.base64_of(each.url)) for each in split.parts]

        parts = await asyncio.to_thread(read) if body.images else read()
        wished = replace(wishes, prompt=tuple(tokens), text=rendered)
        if self._encoder is None:
            return replace(wished, media=await self._loader.load(parts))
        media, handoff = await self._encoder.encode(rendered, parts)
        return replace(wished, media=media, handoff=wishes.handoff or handoff)

    def _check(self, tokens: Sequence[int], items: int, field: str) -> None:
        """Raise `MediaRefused` unless the prompt, not yet expanded, has one image token for each of its media.

        Additional ones come from the client's text, and would get other items' features.
        """
        found = items if self._facts is None else tokens.count(self._facts.image_token_id)
        if found != items:
            raise MediaRefused("placeholder", field, f"{found} image tokens in the prompt", f"{items}, one an image")


def _tokens(packed: bytes) -> tuple[int, ...]:
    """Return packed ids as numbers, in calls short enough not to block the event loop's thread."""
    ids: list[int] = []
    for at in range(0, len(packed), _SLICE):
        ids += unpack_tokens(packed[at : at + _SLICE])
    return tuple(ids)
