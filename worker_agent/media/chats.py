"""Chats with images: split, rendered with a placeholder for each, tokenized, counted, and loaded or encoded elsewhere.

the model takes no images    a part that is not text is refused (`text_only`)
a chat without media         rendered as text; image tokens in it are refused (`placeholder`): the engine would replace
                             them by features of no image
a chat with media            rendered here: `kv_prompt_ids` were computed without the images, and are ignored.
                             `nvext.token_data` beside media is refused as ambiguous
with an encode worker        it loads the media, and its handles or embeddings replace them
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from kv_protocol.body_limits import Body
from kv_protocol.openai.requests import ChatRequest, RequestInvalid
from kv_runtime.text.model import Text
from worker_agent.media.image_models import ImageFacts, check_placeholders
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import MediaChat, MediaPart, names_media
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import Media

NO_IMAGES = Body(b"")


class EncodedMedia(NamedTuple):
    """A prompt's loaded media or their embeddings, or an encode worker's handles."""

    media: tuple[Media, ...] = ()
    handoff: Handoff | None = None


class MediaEncoder(Protocol):
    """Encodes the media of prompts on another worker."""

    async def encode(self, prompt: str, parts: Sequence[MediaPart]) -> EncodedMedia:
        """Return the encoded `parts`, one placeholder each in `prompt`.

        Raises:
            MediaRefused: the media are refused.
            EncoderUnavailable: the encode worker does not answer now.
        """


class EnginePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and the prompt's media, in their order: the fields of these names of an `EngineRequest`.

    `text` is the prompt before tokenization, if it has media. `handoff` has the media if an encode worker encoded them.
    """

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()
    text: str | None = None
    handoff: Handoff | None = None


class ChatMedia:
    """Handles the media of one worker's chats. `facts` None: its model takes none."""

    def __init__(
        self, text: Text, loader: MediaLoader, facts: ImageFacts | None, encoder: MediaEncoder | None = None
    ) -> None:
        self._text, self._loader, self._facts, self._encoder = text, loader, facts, encoder

    async def prompt(self, request: ChatRequest, body: Body = NO_IMAGES) -> EnginePrompt | None:
        """Return the prompt of a chat with media, one image token an item; None for any other, rendered as text.

        `body` has the images that were cut out of the request.

        Raises:
            MediaRefused, RequestInvalid, TextError: they name the field.
            EncoderUnavailable: the encode worker does not answer.
        """
        split = self._split(request)
        if split is None or not split.parts:
            return None
        if request.nvext is not None and request.nvext.prompt_ids() is not None:
            raise RequestInvalid("nvext.token_data", "token ids beside media", "either of them")
        rendered = await asyncio.to_thread(self._text.render_chat, split.messages, **request.template_options)
        tokens = await asyncio.to_thread(self._text.encode, rendered, add_special_tokens=False)
        self.check(tokens, len(split.parts), "messages")

        def read() -> list[MediaPart]:
            return [msgspec.structs.replace(each, base64=body.base64_of(each.url)) for each in split.parts]

        parts = await asyncio.to_thread(read) if body.escaped else read()
        encoded = await self._become(rendered, parts)
        return EnginePrompt(tokens=tuple(tokens), media=encoded.media, text=rendered, handoff=encoded.handoff)

    def check(self, tokens: Sequence[int], items: int, field: str) -> None:
        """Raise `MediaRefused` unless a prompt has one image token for each of its media, and no more."""
        if self._facts is not None:
            with self._loader.counting():
                check_placeholders(tokens, self._facts.image_token_id, items, field)

    def _split(self, request: ChatRequest) -> MediaChat | None:
        if not names_media(request.messages):
            return None
        if self._facts is None:
            with self._loader.counting():
                raise MediaRefused("text_only", "messages", "parts that are not text", "text: the model takes no media")
        return self._loader.split(request.messages, self._facts.placeholder)

    async def _become(self, prompt: str, parts: Sequence[MediaPart]) -> EncodedMedia:
        if self._encoder is None:
            return EncodedMedia(await self._loader.load(parts))
        with self._loader.counting():
            return await self._encoder.encode(prompt, parts)
