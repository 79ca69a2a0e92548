"""Turns a request into its prompt: token ids as the worker will see them, and sequence hashes of full blocks.

    the request has            the ids are
    ----------------------     ------------------------------------------------------------------------
    nvext.token_data           those
    prompt: [ids]              those
    prompt: text               the text's, with what the tokenizer puts around a prompt
    several prompts            known to the worker only; the hashes are the first prompt's
    messages                   the rendered chat's; segments that were encoded before are not encoded again
    input of a response        those of the chat that engines make of it (`kv_protocol/openai/responses.py`)
    messages with images       known to the worker only; the hashes end where an image is unknown (`image_prompts.py`)
    what is not rendered here  known to the worker only; the hashes are those of the request's text (`TEXT_SCHEME`)

A prompt is not rendered if a key changes it in the engine (`Inbound.changed_by`), if an engine made other ids of a chat
(`engine_parity.py`), or if the router has no rule for it. Whether the request is valid is for the worker to say.

A prompt is ready at once if the body is short. A bounded set of threads (`encoding_pool.py`) works on text of more than
`OFF_LOOP_BYTES`, and on prompts that take long to read or render, such as many ids, or images.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace

from indexer.embedded import chat_pieces, hash_blocks
from kv_protocol.body_limits import Body
from kv_protocol.hashing import TEXT_SCHEME, Hashing, hash_seed, unpack_tokens
from kv_protocol.images import ImageRule
from kv_protocol.openai.inbound import CHANGING_KEYS
from kv_protocol.openai.parts import read_messages
from kv_protocol.openai.requests import ChatInbound, CompletionInbound, Inbound, RequestInvalid
from kv_runtime.text.byte_model import END, MARK_OF_ROLE, ByteText
from kv_runtime.text.chat_messages import HasImages, TextError, split_images
from kv_runtime.text.encoders import CONFIGURED
from kv_runtime.text.loading import UnreadText
from kv_runtime.text.model import Text
from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt.chains import TOKEN_BYTES, EncodedPrompt
from router.prompt.encoding_pool import EncodingPool
from router.prompt.image_prompts import before_images, with_images

if TYPE_CHECKING:
    import asyncio

OFF_LOOP_BYTES = {"hf": 4 << 10, "fast": 64 << 10, "byte": 64 << 10, "none": 64 << 10}
"""By encoder: longer text is encoded by threads. This much takes hf about 2 ms, the others some tenths of a ms."""
_READ_BYTES_MAX = 256 << 10
"""Most bytes of JSON that are read on the loop: threads read longer JSON, and chats with many messages."""
_FEW_MESSAGES = 192
"""Most messages of a chat that is rendered on the loop."""
_TEXT_SEED = 0x7465_7874
"""Keeps hashes of text apart from hashes of tokens."""
_PARITY, _TOKEN_DATA = "parity", "nvext.token_data"
UNRENDERED_KEYS = (
    *CHANGING_KEYS,
    _PARITY, "tokenizer", "messages", "tools", "documents", "chat_template_kwargs", "prompt", "input", "other",
)  # fmt: skip
"""The label values of a metric: why a prompt is not rendered."""
_KEY_END = re.compile(r"[.\[]")
_UNPRINTED = re.compile(r"[^\w.\[\]-]", re.ASCII)


CACHE_BYTES_MAX = 256 << 20
WAITING_BYTES_MAX = 64 << 20
"""Text that one thread encodes in about 10 s."""
_log = structlog.get_logger("router")


class ModelPrompts:
    """Prompts of one model's requests."""

    def __init__(
        self,
        text: Text,
        *,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        threads: int = 1,
        hashed: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`hashed` gets the seconds of each prompt's hashing, perhaps in another thread."""
        self._hashed = hashed
        self._text, self.detokenizer = text, text.detokenizer
        """`detokenizer` returns a new one, for one answer."""
        self._pack_chat: Callable[..., bytes | tuple[str, ...]] = text.pack_chat
        if isinstance(text, ByteText):
            self._pack_chat = partial(chat_pieces, text.chat_pieces, MARK_OF_ROLE, END, MARK_OF_ROLE["assistant"])
        self.encoder, self.encoder_name = None, "byte"
        if isinstance(text, UnreadText):
            self.encoder_name = "none"
            _log.warning("tokenizer_unread", directory=text.directory)
        if isinstance(text, TokenizerText):
            text.keep_segments(cache_bytes_max)
            self.encoder, self.encoder_name = text.encoder, text.encoder.name
            if text.encoder.name == "hf" and text.encoder.reason != CONFIGURED:
                _log.warning("encoder_not_fast", reason=text.encoder.reason)
        self._off_loop_bytes = OFF_LOOP_BYTES[self.encoder_name]
        self.pool = EncodingPool(threads, WAITING_BYTES_MAX)
        self._lock = Lock()  # held to change counts: several threads do
        self.other_chats: frozenset[str] = frozenset()
        """Models with an engine whose token ids of a chat differ from the router's (`engine_parity.py`)."""
        self.unrendered = Counter(dict.fromkeys(UNRENDERED_KEYS, 0))
        """Prompts by the key of the request for which they were not rendered."""
        self.images_seen = self.images_unseen = 0

    def prompt(
        self, body: Body, inbound: Inbound, hashing: Hashing, lora: str = "", images: ImageRule | None = None
    ) -> "EncodedPrompt | asyncio.Future[EncodedPrompt]":
        """Return the prompt as the workers of the adapter `lora` (empty: base model) will see it, or its future.

        `images` is the rule for images that those workers state; None: they state none. Cancelling the future skips
        its work, unless that has begun.

        Raises (also the future):
            RequestInvalid: `nvext.token_data` is no list of ids.
            EncodersBusy: too much text waits to be encoded.
        """
        asked = body, inbound, hashing, hash_seed(lora, inbound.salt), images
        made = self._made(*asked, is_aside=False)
        if made is not None:
            return made
        work: Callable[[], Any] = partial(self._made, *asked, is_aside=True)
        return self.pool.submit(work, len(body.text))

    def short_chat(self, chat: Inbound, hashing: Hashing, seed: int) -> EncodedPrompt | None:
        """Return the prompt of a short chat without `UNCOMMON_KEYS`.

        None: `prompt` must be called, as this is no short chat of plain text, or is not rendered here.
        """
        if self.other_chats or not isinstance(chat, ChatInbound) or len(chat.messages) > self._off_loop_bytes:
            return None
        try:
            messages = read_messages(chat.messages)
            if len(messages) > _FEW_MESSAGES:
                return None
            return self._of_tokens(self._pack_chat(messages), "messages", hashing, seed)
        except (HasImages, TextError, RequestInvalid):
            return None

    def _made(
        self, body: Body, inbound: Inbound, hashing: Hashing, seed: int, images: ImageRule | None, *, is_aside: bool
    ) -> EncodedPrompt | None:
        """Return the prompt; None: it would take too long on the loop. In a thread (`is_aside`) never None."""
        size_bytes = 0 if is_aside else len(body.text)
        try:
            if size_bytes > _READ_BYTES_MAX:
                return None
            if (ids := inbound.token_data()) is not None:
                return self._of_tokens(ids, _TOKEN_DATA, hashing, seed)
            is_other = inbound.model in self.other_chats and inbound.endpoint == "chat"
            if key := inbound.changed_by or (_PARITY if is_other else ""):
                return self._not_rendered(inbound, hashing, seed, key)
            is_long = size_bytes > self._off_loop_bytes
            if isinstance(inbound, CompletionInbound):
                is_text = bytes(memoryview(inbound.prompt)[:1]) != b"["
                return None if is_long and is_text else self._of_completion(inbound, hashing, seed)
            return None if is_long else self._of_chat(body, inbound, hashing, seed, images, is_aside=is_aside)
        except (RequestInvalid, TextError) as error:
            if error.field.startswith(_TOKEN_DATA):
                raise
            return self._not_rendered(inbound, hashing, seed, error.field)

    def _of_completion(self, inbound: CompletionInbound, hashing: Hashing, seed: int) -> EncodedPrompt:
        adds = inbound.add_special_tokens is not False
        prompts = [
            self._text.pack(each, add_special_tokens=adds) if isinstance(each, str) else each
            for each in inbound.read_prompts()
        ]
        first = self._of_tokens(prompts[0], "prompt", hashing, seed)
        if len(prompts) == 1:
            return first
        return replace(first, tokens=b"", token_count=sum(map(len, prompts)) // TOKEN_BYTES)

    def _of_chat(
        self, body: Body, inbound: Inbound, hashing: Hashing, seed: int, images: ImageRule | None, *, is_aside: bool
    ) -> EncodedPrompt | None:
        """Return the prompt; None, only on the loop: it has many messages, or images."""
        messages, options = inbound.read_messages(), inbound.read_options()
        if not is_aside and len(messages) > _FEW_MESSAGES:
            return None
        try:
            return self._of_tokens(self._pack_chat(messages, **options), "messages", hashing, seed)
        except HasImages:
            return self._with_images(body, messages, options, hashing, seed, images) if is_aside else None

    def _of_tokens(self, tokens: bytes | tuple[str, ...], key: str, hashing: Hashing, seed: int) -> EncodedPrompt:
        """Return the prompt of these tokens; `key` is the field of the request that has them."""
        if not tokens:
            raise RequestInvalid(key, "0 tokens", "one or more")
        count, hashes, hash_s = hash_blocks(tokens, hashing, seed)
        self._hashed(hash_s)
        return EncodedPrompt(tokens, count, hashing, hashes)

    def _not_rendered(self, inbound: Inbound, hashing: Hashing, seed: int, field: str) -> EncodedPrompt:
        """Return a prompt that only the worker can render, with hashes of the request's text; `field` is the reason."""
        self._count_unrendered(_KEY_END.split(field, 1)[0])
        text = b"".join(inbound.prompt_parts)
        words, hashing = text[: len(text) // TOKEN_BYTES * TOKEN_BYTES], Hashing(hashing.block_size, TEXT_SCHEME)
        count, hashes, _ = hash_blocks(words, hashing, seed ^ _TEXT_SEED)
        return EncodedPrompt(b"", max(1, count), hashing, hashes, _UNPRINTED.sub("?", field) or "other")

    def _with_images(
        self,
        body: Body,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        hashing: Hashing,
        seed: int,
        rule: ImageRule | None,
    ) -> EncodedPrompt:
        """Return a prompt with images, as far as it is known."""
        text = self._text
        chat = split_images(messages, rule.placeholder if rule else "")
        if rule is None or chat.other_media:
            known = before_images(text, chat.messages, options)
        else:
            ids = text.pack_chat(chat.messages, **options)
            known = with_images(unpack_tokens(ids), chat.urls, rule, body)
        with self._lock:
            self.images_seen += known.images_seen
            self.images_unseen += len(chat.urls) - known.images_seen
        if chat.other_media:
            self._count_unrendered("messages")
        began_s = perf_counter()
        hashes = known.sequence_hashes(hashing, seed)
        self._hashed(perf_counter() - began_s)
        return EncodedPrompt(b"", known.token_count, hashing, hashes, chat.other_media)

    def _count_unrendered(self, key: str) -> None:
        with self._lock:
            self.unrendered[key if key in self.unrendered else "other"] += 1
