"""What routing looks for of a chat with images is what an engine's events say that it holds. Planted bugs are found.

router   `ModelPrompts`: the client's bytes, the rule that workers state
engine   the agent's own split of the chat, the model's tokenizer, the cache and the events of the strict fake, hop A,
         the consolidator's mirror. How many tokens an image has is counted by another formula
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from kv_protocol import hashing
from kv_protocol.body_limits import Body
from kv_protocol.codec import unpack_u64
from kv_protocol.hashing import Hashing, unpack_tokens
from kv_protocol.images import FixedTokens, ImageRule, QwenTokens
from kv_protocol.openai.requests import CHAT, decode_inbound
from kv_runtime.text.chat_template import ChatTemplate
from kv_runtime.text.encoders import choose_encoder
from kv_runtime.text.tokenizer_model import TokenizerText
from router.prompt.chains import EncodedPrompt
from router.prompt.prompts import ModelPrompts
from tests.support.amount import examples
from tests.support.chat_ids import chat_ids
from tests.support.trtllm import Fake, installed
from tests.unit.kv_protocol.test_images import upstream
from tests.unit.kv_runtime.model_files import QWEN_TEMPLATE, qwen_like
from tests.unit.worker_agent.media_samples import data_url, image_part
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.mirror import RankMirror
from worker_agent.media import parts
from worker_agent.media.parts import content_digest, split_chat

CALM = settings(max_examples=examples(80))
PLANTED = settings(CALM, max_examples=examples(500), derandomize=True, database=None, phases=[Phase.generate])
PAD, BEGIN, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
LOOPS = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}{%- for part in message.content %}
        {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- else %}{{- part.text }}{%- endif %}
    {%- endfor %}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
AWAY = "https://example.org/cat.png"


def model(template: str) -> TokenizerText:
    tokenizer = qwen_like()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in (BEGIN, PAD, END)])
    rendered = ChatTemplate({"default": template}, {"eos_token": "<|im_end|>"})
    return TokenizerText(tokenizer, "", rendered, choose_encoder(tokenizer, tokenizer.to_str().encode()))


MODELS = {"joins": model(QWEN_TEMPLATE), "loops": model(LOOPS)}
PAD_ID = MODELS["joins"].special_ids[PAD]
RULES = [
    ImageRule(placeholder=BEGIN + PAD + END, image_token_id=PAD_ID, tokens=FixedTokens(7)),
    ImageRule(placeholder=PAD, image_token_id=PAD_ID, tokens=FixedTokens(1), cached_token_id=5000),
    ImageRule(
        placeholder=BEGIN + PAD + END,
        image_token_id=PAD_ID,
        tokens=QwenTokens(patch_size=4, merge_size=2, min_pixels=256, max_pixels=1600),
        cached_token_id=5000,
    ),
]


class Image(NamedTuple):
    """An image of so many pixels, like no other of its name. `url` is empty where it is in a `data:` URL."""

    width: int
    height: int
    name: int
    url: str = ""

    @property
    def data(self) -> bytes:
        """The beginning of a PNG, which has its size, and bytes that tell images apart."""
        size = self.width.to_bytes(4, "big") + self.height.to_bytes(4, "big")
        return b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + size + b"pixels %d" % self.name

    @property
    def part(self) -> dict[str, Any]:
        """It, as clients send it."""
        return image_part(self.url or data_url(self.data))

    def tokens(self, rule: ImageRule) -> int:
        """How many tokens the engine's processor makes of it."""
        if isinstance(rule.tokens, FixedTokens):
            return rule.tokens.tokens
        said, side = rule.tokens, rule.tokens.patch_size * rule.tokens.merge_size
        rows, columns = upstream(self.height, self.width, side, said.min_pixels, said.max_pixels)
        return (rows // side) * (columns // side)


Said = list[str | list[str | Image]]


class Asked(NamedTuple):
    """A request, and how its model reads it."""

    said: Said
    kind: str
    rule: ImageRule
    hashing: Hashing
    salt: str
    lora: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the client says."""
        return [
            {
                "role": ("user", "assistant")[at % 2],
                "content": each if isinstance(each, str) else list(map(_part, each)),
            }
            for at, each in enumerate(self.said)
        ]

    @property
    def images(self) -> list[Image]:
        """All images, in their order."""
        return [part for each in self.said if not isinstance(each, str) for part in each if isinstance(part, Image)]


def _part(said: str | Image) -> dict[str, Any]:
    return {"type": "text", "text": said} if isinstance(said, str) else said.part


texts = st.text("ab \n<é", max_size=25)
seen = st.builds(Image, st.integers(1, 60), st.integers(1, 60), st.integers(0, 2), st.just(""))
unseen = st.builds(Image, st.integers(1, 60), st.integers(1, 60), st.just(9), st.just(AWAY))


def asked_of(images: st.SearchStrategy[Image]) -> st.SearchStrategy[Asked]:
    said = st.lists(st.one_of(texts, st.lists(st.one_of(texts, images), max_size=4)), max_size=4)
    with_one = st.builds(lambda before, image, after: [*before, ["x", image], *after], said, images, said)
    return st.builds(
        Asked,
        with_one,
        st.sampled_from(list(MODELS)),
        st.sampled_from(RULES),
        st.sampled_from([1, 4, 16, 32]).map(Hashing),
        st.sampled_from(["", "tenant"]),
        st.sampled_from(["", "adapter"]),
    )


def routed(asked: Asked, *, rule: ImageRule | None) -> EncodedPrompt:
    """What the router makes of the request."""
    body = json.dumps({"model": "m", "messages": asked.messages, "cache_salt": asked.salt}).encode()
    prompts = ModelPrompts(MODELS[asked.kind])

    async def worked() -> EncodedPrompt:
        waits = prompts.prompt(Body(body), decode_inbound(CHAT, body), asked.hashing, asked.lora, rule)
        assert isinstance(waits, asyncio.Future), "images are nothing for the loop"
        return await waits

    return asyncio.run(worked())


class Computed(NamedTuple):
    """What the engine computed: tokens, where each image begins, and the blocks that its worker's mirror holds."""

    tokens: list[int]
    begins: list[int]
    hashes: list[int]


def computed(fake: Fake, asked: Asked) -> Computed:
    """What a worker makes of the request."""
    media, cache, events = (fake.submodule(f"_fake.{name}") for name in ("media", "cache", "events"))
    rule, block_size = asked.rule, asked.hashing.block_size
    with patch.object(parts, "PARTS_MAX", 64):
        split = split_chat(asked.messages, rule.placeholder)
    prompt = chat_ids(MODELS[asked.kind], split.messages)
    stands_for = rule.image_token_id if rule.cached_token_id is None else rule.cached_token_id
    tokens, items, images = list[int](), list[Any](), iter(asked.images)
    for token in prompt:
        if token == rule.image_token_id:
            image = next(images)
            uuid = content_digest(image.data)
            items.append(media.MediaItem(uuid, uuid, start=len(tokens), length=image.tokens(rule)))
            tokens += [stands_for] * items[-1].length
        else:
            tokens.append(token)
    told = events.RankEvents(1 << 20, 1 << 20, None, None)
    window = cache.BlockCache(block_size, 1 << 16, told)
    identity = cache.Identity(
        lora_id=1 if asked.lora else None,
        cache_salt=asked.salt or None,
        mm_keys=lambda start, end: media.keys_between(items, start, end),
    )
    held = window.begin([*tokens, 0], len(tokens) + 1, identity)  # and the first token of the answer
    window.store(held, [*tokens, 0], identity, partial=False)
    told.flush()
    return Computed(tokens, [item.start for item in items], mirrored(list(told.visible), asked))


def mirrored(events: list[dict[str, Any]], asked: Asked) -> list[int]:
    """The blocks that the worker's consolidator holds by these events."""
    mirror = RankMirror(asked.hashing.block_size)
    for each in events:
        if asked.lora and each["data"]["type"] == "stored":
            each["data"]["lora_name"] = asked.lora
    for _, published in TrtllmRules(asked.hashing.block_size).translate(events):
        mirror.apply(published)
    return [block.sequence_hash for block in mirror.dump()]


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with installed() as installed_fake:
        yield installed_fake


def wrong(fake: Fake, asked: Asked) -> str:
    """Return what routing has wrong of a request all of whose images it can see; empty: nothing."""
    made, done = routed(asked, rule=asked.rule), computed(fake, asked)
    if made.token_count != len(done.tokens):
        return f"{made.token_count} tokens, of {len(done.tokens)}"
    if unpack_u64(made.sequence_hashes) != tuple(done.hashes):
        return f"hashes of {len(done.hashes)} blocks"
    return ""


def test_routing_looks_for_the_blocks_that_the_engine_told_of(fake: Fake) -> None:
    @settings(CALM)
    @given(asked_of(seen))
    def holds(asked: Asked) -> None:
        assert wrong(fake, asked) == ""

    holds()


def test_up_to_an_image_that_is_elsewhere_routing_looks_for_what_the_engine_has(fake: Fake) -> None:
    @settings(CALM)
    @given(asked_of(st.one_of(seen, seen, unseen)))
    def holds(asked: Asked) -> None:
        made, done = routed(asked, rule=asked.rule), computed(fake, asked)
        first = next((at for at, image in enumerate(asked.images) if image.url), None)
        known = len(done.tokens) if first is None else done.begins[first]
        expected = done.hashes[: known // asked.hashing.block_size]
        assert unpack_u64(made.sequence_hashes) == tuple(expected)
        assert known <= made.token_count <= len(done.tokens)

    holds()


def test_of_a_model_that_says_nothing_of_images_routing_looks_for_a_prefix_of_what_the_engine_has(fake: Fake) -> None:
    @settings(CALM)
    @given(asked_of(st.one_of(seen, unseen)))
    def holds(asked: Asked) -> None:
        made, done = unpack_u64(routed(asked, rule=None).sequence_hashes), computed(fake, asked)
        assert made == tuple(done.hashes[: len(made)])
        first = next(at for at, each in enumerate(asked.said) if any(isinstance(part, Image) for part in each))
        before = chat_ids(MODELS[asked.kind], asked.messages[:first], add_generation_prompt=False)
        assert len(made) == len(before) // asked.hashing.block_size, "the mark of the message with the image is the end"

    holds()


def test_ids_of_a_prompt_with_images_are_the_workers_affair() -> None:
    asked = Asked([["a", Image(9, 9, 1)]], "joins", RULES[0], Hashing(4), "", "")
    made = routed(asked, rule=RULES[0])
    assert made.ids == b""
    assert unpack_tokens(made.ids) == []


# ---------------------------------------------------------------- the harness finds mistakes


def found_wrong(fake: Fake) -> str:
    asked = find(asked_of(seen), lambda asked: wrong(fake, asked) != "", settings=PLANTED)
    return wrong(fake, asked)


@pytest.mark.planted
def test_a_key_in_the_first_of_an_images_blocks_alone_is_found(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(runs: list[hashing.MmRun], *sizes: int) -> Any:
        return keys([run._replace(length=1) for run in runs], *sizes)

    keys = hashing.keys_of_blocks
    monkeypatch.setattr(hashing, "keys_of_blocks", first_alone)
    assert found_wrong(fake).startswith("hashes")
