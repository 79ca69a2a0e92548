"""Prompts with images: the tokens up to which the router knows them, and the positions of images.

    the workers state a rule for images           known up to the first unseen image
      a `data:` URL whose first bytes state a size  seen: its digest (BLAKE3), and its number of tokens, by the size
      anything else (https, file, no size)          unseen: only workers fetch images
    the workers state no rule                     known up to the last special token before the first image's message

Known tokens are those that the worker computes on, so that routing uses a correct prefix; block hashes end with the
last completely known block. The functions keep no state, so threads can run them: an image may be megabytes.
"""

import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from kv_protocol.body_limits import Body
from kv_protocol.codec import pack_u64
from kv_protocol.hashing import Hashing, MmRun, chain, expanded, mm_block_hashes, pack_tokens, unpack_tokens
from kv_protocol.image_headers import image_pixels, image_type
from kv_protocol.images import ImageRule
from kv_protocol.openai.requests import RequestInvalid
from kv_runtime.text.chat_messages import UNKNOWN_FROM_HERE, Message
from kv_runtime.text.model import Text
from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt.chains import TOKEN_BYTES

TOKENS_MAX = 1 << 18
"""Bound on the tokens of all images of a prompt: an image of a few bytes may become 65,536 tokens."""
_HEAD_CHARACTERS_MAX = 128
PIECE_DIGITS = 1 << 20
"""Base64 characters that are decoded at a time; an image's size must be in the first of these pieces."""
_DATA = "data:"
_UNKNOWN_BYTE_IDS = pack_tokens(UNKNOWN_FROM_HERE.encode())


class SeenImage(NamedTuple):
    """An image's digest, and its number of tokens."""

    digest: str
    tokens: int


class KnownPrompt(NamedTuple):
    """The first tokens of a prompt, the positions of images in them, and the number of tokens in all.

    An unseen image counts as its placeholder's tokens, so `token_count` is a lower bound.
    """

    tokens: list[int]
    runs: list[MmRun]
    token_count: int
    images_seen: int

    def sequence_hashes(self, hashing: Hashing, seed: int) -> bytes:
        """Return the sequence hashes of the full blocks, packed; `seed` is the seed of local hashes."""
        block_size, is_eagle = hashing.block_size, hashing.is_eagle
        return pack_u64(chain(mm_block_hashes(self.tokens, self.runs, block_size, seed=seed, is_eagle=is_eagle)))


def seen_image(url: str, rule: ImageRule, body: Body | None = None) -> SeenImage | None:
    """Return the image of a `data:` URL; `body` may have cut it out. None: no image, or its tokens are unknown."""
    comma = url.find(",", 0, _HEAD_CHARACTERS_MAX)
    head = url[: max(0, comma)].lower()
    if not head.startswith(_DATA) or not head.endswith(";base64"):
        return None
    digest, first, data = blake3(), b"", b""
    cut = None if body is None else body.base64_of(url)
    encoded = url[comma + 1 :] if cut is None else cut
    for at in range(0, len(encoded), PIECE_DIGITS):
        if len(data) % 3:  # the piece before ended with padding
            return None
        try:
            data = binascii.a2b_base64(encoded[at : at + PIECE_DIGITS], strict_mode=True)
        except ValueError:  # also raised for characters that are not ASCII
            return None
        digest.update(data)
        first = first or data
    kind = image_type(first)
    pixels = None if kind is None else image_pixels(first, kind)
    tokens = None if pixels is None else rule.tokens.count(*pixels)
    return None if tokens is None else SeenImage(digest.hexdigest(), tokens)


def seen_images(urls: Sequence[str], rule: ImageRule, body: Body | None = None) -> list[SeenImage]:
    """Return the images before the first one that is unseen, or would exceed `TOKENS_MAX`."""
    seen: list[SeenImage] = []
    remaining = TOKENS_MAX
    for url in urls:
        image = seen_image(url, rule, body)
        if image is None or image.tokens > remaining:
            break
        remaining -= image.tokens
        seen.append(image)
    return seen


def with_images(ids: Sequence[int], urls: Sequence[str], rule: ImageRule, body: Body | None = None) -> KnownPrompt:
    """Return what is known of a prompt whose text, with one placeholder per image, has these `ids`.

    Raises:
        RequestInvalid: more or fewer image tokens than images: a text contains one, or the template drops one.
    """
    image_positions = [at for at, token in enumerate(ids) if token == rule.image_token_id]
    if len(image_positions) != len(urls):
        raise RequestInvalid(
            "messages", f"{len(image_positions)} image tokens in the prompt", f"{len(urls)}, one an image"
        )
    seen = seen_images(urls, rule, body)
    end = image_positions[len(seen)] if len(seen) < len(image_positions) else len(ids)
    tokens, runs = expanded(
        ids[:end],
        rule.image_token_id,
        [image.digest for image in seen],
        [image.tokens for image in seen],
        cached_token_id=rule.cached_token_id,
    )
    return KnownPrompt(tokens, runs, len(tokens) + len(ids) - end, len(seen))


def before_images(text: Text, messages: Sequence[Message], options: dict[str, Any]) -> KnownPrompt:
    """Return the known beginning of a chat that contains `UNKNOWN_FROM_HERE`, up to that mark at most."""
    if not isinstance(text, TokenizerText):
        ids = text.pack_chat(messages, **options)
        return KnownPrompt(unpack_tokens(ids[: max(0, ids.find(_UNKNOWN_BYTE_IDS))]), [], len(ids) // TOKEN_BYTES, 0)
    rendered = text.render_chat(messages, **options)
    before = rendered[: max(0, rendered.find(UNKNOWN_FROM_HERE))]
    marks = text.mark_spans(before)
    known = before[: marks[-1][0]] if marks else ""
    ids, rest = text.pack_marked(known), text.pack_marked(rendered[len(known) :])
    return KnownPrompt(unpack_tokens(ids), [], (len(ids) + len(rest)) // TOKEN_BYTES, 0)
