"""Turns a request into its prompt: token ids as the worker will see them, and sequence hashes of full blocks.

    the request has            the ids are
    ----------------------     ------------------------------------------------------------------------
    nvext.token_data           those
    prompt: [ids]              those
    prompt: text               the text's, with what the tokenizer puts around a prompt
    several prompts            the worker's alone; the hashes are the first one's
    messages                   the rendered chat's; segments that were encoded before are not encoded again
    input of a response        those of the chat that it is (`kv_protocol/openai/responses_chat.py`)
    messages with images       the worker's alone; its hashes are known as far as its images are (`image_prompts.py`)
    what is not rendered here  the worker's alone; the hashes are those of the request's text (`TEXT_SCHEME`)

A prompt is not rendered if a key changes it in the engine (`Inbound.changed_by`), or if no rule here makes text or
tokens of it. Only the worker knows whether it is wrong.

Ready at once where it is short. Text of more than `off_loop_bytes`, and prompts that are long to read or render, ids
and images too, are worked on by a bounded set of threads (`encoding_pool.py`).
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from indexer.embedded import hash_blocks
from kv_protocol.body_limits import Body
from kv_protocol.hashing import TEXT_SCHEME, Hashing, hash_seed, unpack_tokens
from kv_protocol.images import ImageRule
from kv_protocol.openai.inbound import CHANGING_KEYS
from kv_protocol.openai.requests import ChatInbound, CompletionInbound, Inbound, RequestInvalid, is_given
from kv_protocol.openai.responses import ResponsesInbound
from kv_runtime.text.chat_messages import HasImages, TextError, split_images
from kv_runtime.text.encoders import CONFIGURED
from kv_runtime.text.model import Detokenizer, Text
from kv_runtime.text.tokenizer_model import TokenizerText
from kv_runtime.text.unread import UnreadText
from router.prompt.encoding_pool import EncodingPool
from router.prompt.image_prompts import KnownPrompt, before_images, names_embeddings, with_images

if TYPE_CHECKING:
    import asyncio

_TOKEN_BYTES = 4
_OFF_LOOP_BYTES = {"hf": 4 << 10, "fast": 64 << 10, "byte": 64 << 10, "none": 64 << 10}
"""Some 2 ms of the first, and some tenths of one of the others."""
_READ_BYTES_MAX = 256 << 10
"""Bytes of JSON that are read on the loop; threads take more, and chats with many messages."""
_TEXT_SEED = 0x7465_7874
"""Keeps hashes of text apart from those of tokens."""
_PARITY = "parity"
UNRENDERED_KEYS = (
    *CHANGING_KEYS,
    _PARITY, "tokenizer", "messages", "tools", "documents", "chat_template_kwargs", "prompt", "input", "other",
)  # fmt: skip
"""What a metric tells apart."""
_KEY_END = re.compile(r"[.\[]")
_UNPRINTED = re.compile(r"[^\w.\[\]-]", re.ASCII)
_MESSAGE_BYTES = 1 << 10
"""Cost of rendering a message beside its text, as additional bytes."""


class PromptLimits(NamedTuple):
    """Bounds of encoding; `off_loop_bytes` 0: derived from the encoder's speed."""

    cache_bytes_max: int = 256 << 20
    threads: int = 1
    off_loop_bytes: int = 0
    waiting_bytes_max: int = 64 << 20
    """What one thread encodes in some 10 s."""


_Chat = ChatInbound | ResponsesInbound
_log = structlog.get_logger("router")
DEFAULT_LIMITS = PromptLimits()


class EncodedPrompt(NamedTuple):
    """Token ids as little-endian u32s, and the sequence hashes of their full blocks as little-endian u64s.

    With images there are no ids: the worker makes its own. `token_count` then is the least that it has, and hashes
    there are of the blocks that are known. `unrendered`: the field for which the prompt is not known here, and hashes
    are of its text; empty: it is.
    """

    ids: bytes
    token_count: int
    hashing: Hashing
    sequence_hashes: bytes
    unrendered: str = ""


class ModelPrompts:
    """Prompts of one model's requests."""

    def __init__(
        self, text: Text, limits: PromptLimits = DEFAULT_LIMITS, *, hashed: Callable[[float], None] = lambda _: None
    ) -> None:
        """`hashed` gets the seconds of each prompt's hashing, perhaps in another thread."""
        self._hashed = hashed
        self._text = text
        self.encoder, self.encoder_name = None, "byte"
        if isinstance(text, UnreadText):
            self.encoder_name = "none"
            _log.warning("tokenizer_unread", directory=text.directory)
        if isinstance(text, TokenizerText):
            text.keep_segments(limits.cache_bytes_max)
            self.encoder, self.encoder_name = text.encoder, text.encoder.name
            if text.encoder.name == "hf" and text.encoder.reason != CONFIGURED:
                _log.warning("encoder_not_fast", reason=text.encoder.reason)
        self._off_loop_bytes = limits.off_loop_bytes or _OFF_LOOP_BYTES[self.encoder_name]
        self.pool = EncodingPool(limits.threads, limits.waiting_bytes_max)
        """Long prompts are encoded only while its parts run."""
        self._lock = Lock()  # several threads count
        self.other_chats: frozenset[str] = frozenset()
        """Models with an engine whose token ids of a chat differ from the router's (`engine_parity.py`)."""
        self.unrendered = Counter(dict.fromkeys(UNRENDERED_KEYS, 0))
        """Prompts by the key of the request for which they were not rendered."""
        self.images_seen = self.images_unseen = 0

    def prompt(
        self,
        inbound: Inbound,
        hashing: Hashing,
        lora: str = "",
        images: ImageRule | None = None,
        *,
        body: Body | None = None,
    ) -> "EncodedPrompt | asyncio.Future[EncodedPrompt]":
        """Return the prompt as the workers of the adapter `lora` (empty: base model) will see it, or its future.

        `images` is what those workers say that images become; None: they do not say. `body` has the images that were
        cut out of the request. A cancelled future ends its work, unless that has begun.

        Raises (also the future):
            RequestInvalid: `nvext.token_data` is no list of ids.
            EncodersBusy: too much text waits to be encoded.
        """
        finish = _Finish(hashing, hash_seed(lora, inbound.salt), self._hashed, images, body)
        if inbound.nvext is not None and is_given(given := inbound.nvext.token_data):
            work = partial(_of_token_data, inbound, finish)
            return work() if len(given) <= _READ_BYTES_MAX else self.pool.submit(work, len(given))
        is_other = inbound.model in self.other_chats and inbound.endpoint == "chat"
        if key := inbound.changed_by or (_PARITY if is_other else ""):
            size_bytes = sum(map(len, inbound.prompt_parts))
            return self._worked(partial(self._not_rendered, inbound, finish, key), size_bytes, _READ_BYTES_MAX)
        if isinstance(inbound, (ChatInbound, ResponsesInbound)):
            return self._chat(inbound, finish)
        assert isinstance(inbound, CompletionInbound)
        return self._completion(inbound, finish)

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer for one answer."""
        return self._text.detokenizer()

    def _chat(self, inbound: _Chat, finish: "_Finish") -> "EncodedPrompt | asyncio.Future[EncodedPrompt]":
        size_bytes = inbound.rendered_bytes
        if size_bytes <= self._off_loop_bytes:
            try:
                messages = inbound.read_messages()
                if size_bytes + len(messages) * _MESSAGE_BYTES <= _READ_BYTES_MAX:
                    return finish.prompt(self._text.pack_chat(messages, **inbound.read_options()), "messages")
            except HasImages:
                pass
            except (RequestInvalid, TextError) as error:
                return self._not_rendered(inbound, finish, error.field)
        work = partial(self._tried, partial(self._whole_chat, inbound, finish), inbound, finish)
        return self.pool.submit(work, size_bytes)

    def _whole_chat(self, inbound: _Chat, finish: "_Finish") -> EncodedPrompt:
        messages, options = inbound.read_messages(), inbound.read_options()
        try:
            return finish.prompt(self._text.pack_chat(messages, **options), "messages")
        except HasImages:
            return self._with_images(messages, options, finish)

    def _completion(
        self, inbound: CompletionInbound, finish: "_Finish"
    ) -> "EncodedPrompt | asyncio.Future[EncodedPrompt]":
        size_bytes = len(inbound.prompt)
        work = partial(self._tried, partial(self._of_prompts, inbound, finish), inbound, finish)
        is_ids = bytes(memoryview(inbound.prompt)[:1]) == b"["
        return self._worked(work, size_bytes, _READ_BYTES_MAX if is_ids else self._off_loop_bytes)

    def _of_prompts(self, inbound: CompletionInbound, finish: "_Finish") -> EncodedPrompt:
        adds = inbound.add_special_tokens is not False
        prompts = [
            self._text.pack(each, add_special_tokens=adds) if isinstance(each, str) else each
            for each in inbound.read_prompts()
        ]
        first = finish.prompt(prompts[0], "prompt")
        if len(prompts) == 1:
            return first
        return first._replace(ids=b"", token_count=sum(map(len, prompts)) // _TOKEN_BYTES)

    def _tried(self, work: Callable[[], EncodedPrompt], inbound: Inbound, finish: "_Finish") -> EncodedPrompt:
        try:
            return work()
        except (RequestInvalid, TextError) as error:
            return self._not_rendered(inbound, finish, error.field)

    def _not_rendered(self, inbound: Inbound, finish: "_Finish", field: str) -> EncodedPrompt:
        self._count_unrendered(_KEY_END.split(field, 1)[0])
        return finish.text(b"".join(inbound.prompt_parts), _UNPRINTED.sub("?", field) or "other")

    def _with_images(self, messages: list[dict[str, Any]], options: dict[str, Any], finish: "_Finish") -> EncodedPrompt:
        rule, text = finish.images, self._text
        chat = split_images(messages, rule.placeholder if rule else "")
        if rule is None or chat.other_media:
            known = before_images(text, chat.messages, options)
        else:
            ids = text.pack_chat(chat.messages, **options)
            known = with_images(unpack_tokens(ids), chat.urls, rule, finish.body)
        if any(map(names_embeddings, chat.urls)):
            known = known.unknown
        with self._lock:
            self.images_seen += known.images_seen
            self.images_unseen += len(chat.urls) - known.images_seen
        if chat.other_media:
            self._count_unrendered("messages")
        return finish.known(known)._replace(unrendered=chat.other_media)

    def _count_unrendered(self, key: str) -> None:
        with self._lock:
            self.unrendered[key if key in self.unrendered else "other"] += 1

    def _worked(
        self, work: Callable[[], EncodedPrompt], size_bytes: int, limit_bytes: int
    ) -> "EncodedPrompt | asyncio.Future[EncodedPrompt]":
        return work() if size_bytes <= limit_bytes else self.pool.submit(work, size_bytes)


def _of_token_data(inbound: Inbound, finish: "_Finish") -> EncodedPrompt:
    return finish.prompt(inbound.token_data() or b"", "nvext.token_data")


class _Finish:
    """Turns the ids of one request into its prompt."""

    __slots__ = ("body", "hashed", "hashing", "images", "seed")

    def __init__(
        self,
        hashing: Hashing,
        seed: int,
        hashed: Callable[[float], None],
        images: ImageRule | None,
        body: Body | None,
    ) -> None:
        self.hashing, self.seed, self.hashed = hashing, seed, hashed
        self.images, self.body = images, body

    def prompt(self, ids: bytes, key: str) -> EncodedPrompt:
        """Return the prompt; `key` is where the request has it."""
        if not ids:
            raise RequestInvalid(key, "0 tokens", "one or more")
        hashing = self.hashing
        began_s = perf_counter()
        hashes = hash_blocks(ids, hashing.block_size, self.seed, is_eagle=hashing.is_eagle)
        self.hashed(perf_counter() - began_s)
        return EncodedPrompt(ids, len(ids) // _TOKEN_BYTES, hashing, hashes)

    def known(self, known: KnownPrompt) -> EncodedPrompt:
        """Return a prompt with images, as far as it is known."""
        began_s = perf_counter()
        hashes = known.sequence_hashes(self.hashing, self.seed)
        self.hashed(perf_counter() - began_s)
        return EncodedPrompt(b"", known.token_count, self.hashing, hashes)

    def text(self, text: bytes, field: str) -> EncodedPrompt:
        """Return a prompt that only the worker knows, by the request's text; `field` is why."""
        block_size, words = self.hashing.block_size, text[: len(text) // _TOKEN_BYTES * _TOKEN_BYTES]
        hashes = hash_blocks(words, block_size, self.seed ^ _TEXT_SEED)
        count = max(1, len(words) // _TOKEN_BYTES)
        return EncodedPrompt(b"", count, Hashing(block_size, TEXT_SCHEME), hashes, unrendered=field)
