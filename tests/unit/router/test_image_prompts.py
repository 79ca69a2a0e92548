"""Prompts with images: what a router sees of them, what it refuses, and what workers get."""

import asyncio
import base64
import json
from typing import Any

import pytest
from tokenizers import AddedToken

from kv_protocol.body_limits import Body, BodyLimits, read_body
from kv_protocol.codec import pack_u64
from kv_protocol.hashing import EAGLE_HASH_SCHEME, Hashing, chain, local_block_hashes, mm_hash
from kv_protocol.images import FixedTokens, ImageRule, QwenTokens
from kv_protocol.openai.requests import CHAT, RequestInvalid, decode_inbound
from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.chat_messages import IMAGES_MAX, split_images
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import choose_encoder
from kv_runtime.text.model import Text
from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt import image_prompts
from router.prompt.chains import EncodedPrompt
from router.prompt.encoding_pool import EncodersBusy
from router.prompt.image_prompts import TOKENS_MAX, SeenImage, before_images, seen_image, seen_images, with_images
from router.prompt.prompts import ModelPrompts
from tests.support.chat_ids import chat_ids
from tests.unit.kv_runtime.model_files import LLAMA_TEMPLATE, QWEN_TEMPLATE, llama_like, qwen_like
from tests.unit.router.plane import running_plane
from tests.unit.router.upstream import Upstream, answers, completion
from tests.unit.worker_agent.media_samples import (
    GIF,
    JPEG,
    PNG,
    WEBP_EXTENDED,
    WEBP_LOSSLESS,
    WEBP_LOSSY,
    chat,
    data_url,
    image_part,
)
from worker_agent.media.parts import content_digest

FIXED = ImageRule(placeholder="<image>", image_token_id=9, tokens=FixedTokens(3))
BY_SIZE = ImageRule(
    placeholder="<image>",
    image_token_id=9,
    tokens=QwenTokens(patch_size=1, merge_size=1, min_pixels=1, max_pixels=1 << 16),
)
AWAY = "https://example.org/cat.png"
TEXT_PART = {"type": "text", "text": "what?"}


def png(width: int, height: int) -> bytes:
    return PNG[:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + PNG[24:]


# ---------------------------------------------------------------- an image


@pytest.mark.parametrize("slash", [b"/", rb"\/"])
def test_an_image_that_is_cut_out_of_a_body_is_the_same_however_its_slashes_are_written(slash: bytes) -> None:
    data = PNG + b"\xff" * (1 << 20)
    written = json.dumps({"messages": chat(image_part(data_url(data)))}).encode().replace(b"/", slash)
    body = read_body(written, BodyLimits(), "m")
    url = json.loads(body.text)["messages"][0]["content"][0]["image_url"]["url"]
    assert len(body.text) < 500
    assert seen_image(url, BY_SIZE, body) == SeenImage(content_digest(data), 13 * 7)


@pytest.mark.parametrize("data", [PNG, GIF, JPEG, WEBP_LOSSY, WEBP_LOSSLESS, WEBP_EXTENDED])
def test_an_image_in_a_url_is_its_digest_and_counted_by_its_size(data: bytes) -> None:
    assert seen_image(data_url(data), BY_SIZE) == SeenImage(content_digest(data), 13 * 7)


def test_an_image_is_read_in_pieces_and_is_the_same_image(monkeypatch: pytest.MonkeyPatch) -> None:
    large = PNG + bytes(range(256)) * 40
    for digits in (36, 64, 1 << 20):
        monkeypatch.setattr(image_prompts, "PIECE_DIGITS", digits)
        assert seen_image(data_url(large), BY_SIZE) == SeenImage(content_digest(large), 13 * 7)


@pytest.mark.parametrize(
    "url",
    [
        AWAY,
        "file:///srv/cat.png",
        "/srv/cat.png",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png,cat",
        "data:" + "x" * 200 + ";base64," + base64.b64encode(PNG).decode(),
        data_url(PNG)[:-2],
        data_url(PNG).replace("A", "\u00e4"),
        data_url(PNG).replace("A", "!"),
        data_url(b"no image"),
        data_url(PNG[:20]),
        data_url(png(0, 7)),
        data_url(png(4001, 20)),
    ],
)
def test_of_what_cannot_be_counted_nothing_is_seen(url: str) -> None:
    assert seen_image(url, BY_SIZE) is None


@pytest.mark.parametrize("first_bytes", [25, 26])
def test_an_image_whose_base64_has_padding_before_its_end_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, first_bytes: int
) -> None:
    monkeypatch.setattr(image_prompts, "PIECE_DIGITS", 36)
    assert seen_image(data_url(PNG[:first_bytes]), BY_SIZE) is not None
    assert seen_image(data_url(PNG[:first_bytes]) + base64.b64encode(PNG).decode(), BY_SIZE) is None


def test_after_an_image_that_is_not_seen_none_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    look = image_prompts.seen_image

    def counted(url: str, rule: ImageRule, body: Body | None = None) -> SeenImage | None:
        looked.append(url)
        return look(url, rule, body)

    monkeypatch.setattr(image_prompts, "seen_image", counted)
    assert len(seen_images([data_url(PNG), AWAY, data_url(GIF)], FIXED)) == 1
    assert looked == [data_url(PNG), AWAY]


def test_images_of_more_tokens_than_are_looked_at_are_not_seen() -> None:
    largest = ImageRule(placeholder="<image>", image_token_id=9, tokens=FixedTokens(1 << 16))
    assert len(seen_images([data_url(PNG)] * 10, largest)) == TOKENS_MAX >> 16


# ---------------------------------------------------------------- a prompt


def test_an_image_that_is_not_seen_ends_what_is_known_and_counts_as_one_token() -> None:
    known = with_images([1, 9, 2, 9, 3, 9, 4], [data_url(PNG), AWAY, data_url(GIF)], FIXED)
    assert (known.tokens, known.token_count, known.images_seen) == ([1, 9, 9, 9, 2], 5 + 4, 1)
    assert [run.start for run in known.runs] == [1]


@pytest.mark.parametrize("urls", [[], [AWAY], [AWAY] * 3])
def test_as_many_image_tokens_as_images_there_must_be(urls: list[str]) -> None:
    with pytest.raises(RequestInvalid, match=f'messages: found "2 image tokens in the prompt", allowed {len(urls)},'):
        with_images([1, 9, 2, 9], urls, FIXED)


def bytes_before(content: Any) -> bytes:
    split = split_images([{"role": "system", "content": "hello"}, {"role": "user", "content": content}], "")
    known = before_images(ByteText(), split.messages, {})
    return bytes(token for token in known.tokens if token < 256)


def test_of_the_byte_model_all_is_known_up_to_the_message() -> None:
    assert bytes_before([TEXT_PART, image_part(AWAY)]) == b"hello"
    assert bytes_before([image_part(AWAY)]) == b"hello"


ASKS_FIRST = (
    "{%- set ns = namespace(images=false) %}"
    "{%- for message in messages %}{%- if message.content is not string %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{%- set ns.images = true %}{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}"
    "{{- '<|im_start|>system\\n' + ('vision' if ns.images else 'text') + ' is on<|im_end|>\\n' }}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{{- part.text if part.type == 'text' else '<image>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
)


def known_text(text: Text, messages: list[dict[str, Any]]) -> str:
    return text.decode(before_images(text, split_images(messages, "").messages, {}).tokens)


def tokenizer_text(template: str, *, is_qwen: bool = True) -> TokenizerText:
    tokenizer = qwen_like() if is_qwen else llama_like()
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False, special=True)])
    rendered = ChatTemplate({"default": template}, {"bos_token": "<|begin_of_text|>"})
    return TokenizerText(tokenizer, "", rendered, choose_encoder(tokenizer, tokenizer.to_str().encode()))


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tokenizer_text(QWEN_TEMPLATE), "user\nhello\n"),
        (tokenizer_text(LLAMA_TEMPLATE, is_qwen=False), "system\n\nuser\n\nhellouser"),
        (tokenizer_text(ASKS_FIRST), "system\nvision is on\nuser\nhello\n"),
    ],
)
def test_for_an_unknown_model_the_messages_before_are_known_up_to_a_mark(text: Text, expected: str) -> None:
    assert known_text(text, [*HELLO, *chat(TEXT_PART, image_part(AWAY))]) == expected


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "no chat", "<|im_start|>user {{ 'x' * 9 }}"])
def test_where_a_template_writes_no_mark_before_it_or_not_the_message_nothing_is_known(template: str) -> None:
    assert known_text(tokenizer_text(template), [*chat(TEXT_PART, image_part(AWAY))]) == ""


# ---------------------------------------------------------------- all of it


def worked(
    prompts: ModelPrompts, fields: dict[str, Any], hashing: Hashing, rule: ImageRule | None = None
) -> EncodedPrompt:
    """Return the prompt, made by a thread where it is left to one."""
    body = json.dumps({"model": "m"} | fields).encode()

    async def made() -> EncodedPrompt:
        waits = prompts.prompt(Body(body), decode_inbound(CHAT, body), hashing, "", rule)
        return waits if isinstance(waits, EncodedPrompt) else await waits

    return asyncio.run(made())


def rule_of(text: TokenizerText) -> ImageRule:
    return ImageRule(placeholder="<image>", image_token_id=text.special_ids["<image>"], tokens=FixedTokens(5))


def test_an_engine_that_drafts_has_hashes_of_one_token_more() -> None:
    text = tokenizer_text(QWEN_TEMPLATE)
    rule = rule_of(text)
    asked = chat(image_part(data_url(PNG)), TEXT_PART)
    made = worked(ModelPrompts(text), {"messages": asked}, Hashing(4, EAGLE_HASH_SCHEME), rule)
    image, plain = rule.image_token_id, chat_ids(text, split_images(asked, "<image>").messages)
    tokens = [each for token in plain for each in ([image] * 5 if token == image else [token])]
    keys = [[mm_hash(content_digest(PNG))] if image in tokens[at : at + 4] else [] for at in range(0, len(tokens), 4)]
    assert made.sequence_hashes == pack_u64(chain(local_block_hashes(tokens, 4, mm_hashes=keys, is_eagle=True)))
    assert made.token_count == len(tokens)


def test_the_next_turn_of_a_chat_with_images_is_not_encoded_anew() -> None:
    text = tokenizer_text(QWEN_TEMPLATE)
    prompts, asked = (
        ModelPrompts(text),
        chat(image_part(data_url(PNG)), {"type": "text", "text": "what is this? " * 90}),
    )
    first = worked(prompts, {"messages": asked}, Hashing(4), rule_of(text))
    asked += [{"role": "assistant", "content": "a cat"}, *HELLO]
    second = worked(prompts, {"messages": asked}, Hashing(4), rule_of(text))
    assert prompts.encoder is not None
    assert prompts.encoder.kept().hit_bytes > 1000
    fresh = worked(ModelPrompts(text), {"messages": asked}, Hashing(4), rule_of(text))
    assert second == fresh
    assert second.sequence_hashes[: 8 * 80] == first.sequence_hashes[: 8 * 80]


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([{"type": "image_url"}], "messages[0].content[0].image_url"),
        ([image_part(AWAY), {"type": "text", "text": "an <image>"}], "messages[0].content[1].text"),
        ([image_part(AWAY)] * (IMAGES_MAX + 1), f"messages[0].content[{IMAGES_MAX}]"),
        ([image_part(AWAY), {"type": "video_url"}], "messages[0].content[1].type"),
        ([image_part(AWAY), {"type": "text"}], "messages[0].content[1].text"),
    ],
)
def test_what_is_not_rendered_is_named_however_long_the_chat_is(parts: list[Any], field: str, padding: int) -> None:
    asked = [*chat(*parts), {"role": "user", "content": "x" * padding}]
    made = worked(ModelPrompts(tokenizer_text(QWEN_TEMPLATE)), {"messages": asked}, Hashing(4), FIXED)
    assert made.unrendered == field


def test_a_chat_whose_text_says_an_image_token_in_another_way_is_not_rendered() -> None:
    text = tokenizer_text(QWEN_TEMPLATE)
    rule = ImageRule(placeholder="[<image>]", image_token_id=text.special_ids["<image>"], tokens=FixedTokens(5))
    asked = chat(image_part(AWAY), {"type": "text", "text": "an <image>"})
    assert worked(ModelPrompts(text), {"messages": asked}, Hashing(4), rule).unrendered == "messages"


def test_images_wait_for_a_thread_within_the_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prompt.prompts.WAITING_BYTES_MAX", 1000)
    text = tokenizer_text(QWEN_TEMPLATE)
    prompts = ModelPrompts(text)
    body = json.dumps({"model": "m", "messages": chat(image_part(data_url(PNG + bytes(400))))}).encode()

    async def asked() -> None:
        waits = prompts.prompt(Body(body), decode_inbound(CHAT, body), Hashing(4), "", rule_of(text))
        assert isinstance(waits, asyncio.Future)
        with pytest.raises(EncodersBusy):
            prompts.prompt(Body(body), decode_inbound(CHAT, body), Hashing(4), "", rule_of(text))
        waits.cancel()

    asyncio.run(asked())


@pytest.mark.parametrize("takes_ids", [True, False])
async def test_a_worker_gets_a_chat_with_images_byte_for_byte_and_no_ids(takes_ids: bool) -> None:
    body = b' {"model" : "m",\n"messages":[{"role":"user","content":[' + encoded_part(image_part(AWAY)) + b"]}]}\n"
    async with running_plane() as plane, Upstream(answers(200, completion())) as worker:
        plane.join("w0", worker.base_url, accepts_token_ids=takes_ids)
        answered = await plane.post(body, CHAT)
        (received,) = worker.received
    assert (answered.status, received.body) == (200, body)


def encoded_part(part: dict[str, Any]) -> bytes:
    return json.dumps(part).encode()


async def test_a_chat_with_an_image_goes_where_the_image_is_held() -> None:
    rule = ImageRule(placeholder="\x01", image_token_id=1, tokens=FixedTokens(100))
    messages = [{"role": "user", "content": [image_part(data_url(PNG)), TEXT_PART]}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    async with running_plane() as plane, Upstream(answers(200, completion())) as worker:
        plane.join("w0", worker.base_url, images=rule)
        plane.join("w1", worker.base_url, images=rule, holds=6)
        answered = await plane.post(body, CHAT)
        record = plane.routing.decisions.find(answered.headers["x-request-id"])
    assert (answered.headers["x-worker-instance-id"], answered.headers["x-overlap-blocks"]) == ("w1", "6")
    assert record is not None
    assert record.verdict.request.isl_tokens > 100
