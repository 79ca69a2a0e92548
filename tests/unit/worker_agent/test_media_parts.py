"""Content parts become text and media, and bytes become media, or are refused with a reason."""

import sys
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from kv_protocol.image_headers import image_pixels, image_type
from tests.support.tensorrt_llm_fake.PIL import Image as pillow  # noqa: N813 - a module
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
    reason_of,
    refused,
)
from worker_agent.engines.trtllm.tensors import image_of
from worker_agent.media.config import MediaSection
from worker_agent.media.parts import (
    PARTS_MAX,
    REQUEST_BYTES_MAX,
    MediaPart,
    check_total,
    checked_media,
    names_media,
    split_chat,
)
from worker_agent.media.refusals import MediaRefused, shown_url
from worker_agent.port.types import RequestRefused

RULES = MediaSection()
PLACEHOLDER = "<|image|>"
URL = "https://example.org/a.png"
HUGE_FRAME = bytes.fromhex("ffc0000b084e204e2001011100")
"""A JPEG's frame header of 20,000 x 20,000 pixels."""
HUGE_SIDES = (20_000).to_bytes(4) * 2


def part(url: str = URL) -> MediaPart:
    return MediaPart(field="messages[0].content[0].image_url.url", url=url)


def test_parts_become_text_with_a_placeholder_and_media_in_their_order() -> None:
    text = {"type": "text", "text": "and"}
    split = split_chat(chat(image_part(URL), text, image_part("/d/b.png", detail="low")), PLACEHOLDER)
    stands = {"type": "text", "text": PLACEHOLDER}
    assert split.messages == chat(stands, text, stands)
    assert split.parts == (
        MediaPart(field="messages[0].content[0].image_url.url", url=URL),
        MediaPart(field="messages[0].content[2].image_url.url", url="/d/b.png"),
    )


@pytest.mark.parametrize(
    ("found", "reason", "field"),
    [
        (3, "part_form", "messages[0].content[0]"),
        ({"type": ["text"]}, "part_form", "messages[0].content[0]"),
        ({"type": "text", "text": 1}, "part_form", "messages[0].content[0].text"),
        ({"type": "text", "text": f"a{PLACEHOLDER}b"}, "placeholder", "messages[0].content[0].text"),
        ({"type": "refusal", "refusal": PLACEHOLDER}, "placeholder", "messages[0].content[0].refusal"),
        ({"type": "video_url", "video_url": {"url": URL}}, "part_kind", "messages[0].content[0].type"),
        ({"type": "image_url", "image_url": URL}, "part_form", "messages[0].content[0]"),
        ({**image_part(URL), "uuid": "a"}, "part_form", "messages[0].content[0]"),
        (image_part(URL, size=1), "part_form", "messages[0].content[0]"),
        (image_part(URL, detail="full"), "part_form", "messages[0].content[0].image_url.detail"),
        (image_part(None), "part_form", "messages[0].content[0].image_url.url"),
        (image_part(""), "part_form", "messages[0].content[0].image_url.url"),
    ],
)
def test_another_part_is_refused_at_its_place(found: Any, reason: str, field: str) -> None:
    with pytest.raises(MediaRefused) as caught:
        split_chat(chat(found), PLACEHOLDER)
    assert (refused(caught), caught.value.field) == (reason, field)


@pytest.mark.parametrize("text", [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}])
def test_text_of_every_type_is_no_media(text: Any) -> None:
    assert not names_media(chat(text))
    assert split_chat(chat(image_part(URL), text), PLACEHOLDER).messages[0]["content"][1] == text


def test_a_placeholder_in_plain_content_is_refused() -> None:
    with pytest.raises(MediaRefused) as caught:
        split_chat([{"role": "user", "content": PLACEHOLDER}], PLACEHOLDER)
    assert caught.value.field == "messages[0].content"


def test_one_more_than_is_allowed_is_refused_in_all_messages_together() -> None:
    messages = chat(image_part(URL)) * PARTS_MAX
    assert len(split_chat(messages, PLACEHOLDER).parts) == PARTS_MAX
    with pytest.raises(MediaRefused) as caught:
        split_chat(messages + chat(image_part(URL)), PLACEHOLDER)
    assert (refused(caught), caught.value.field) == ("parts_count", f"messages[{PARTS_MAX}].content[0]")


TYPES = {PNG: "image/png", GIF: "image/gif", JPEG: "image/jpeg"}
TYPES |= dict.fromkeys((WEBP_LOSSY, WEBP_LOSSLESS, WEBP_EXTENDED), "image/webp")


@pytest.mark.parametrize(("data", "media_type"), TYPES.items())
def test_an_image_is_known_by_its_bytes(data: bytes, media_type: str) -> None:
    for said in (None, media_type, f"{media_type.upper()}; charset=x", "application/octet-stream"):
        media = checked_media(part(), data, said)
        assert (media.media_type, media.pixels, media.digest) == (media_type, (13, 7), blake3(data).hexdigest())


def test_a_jpeg_may_be_called_as_clients_call_it() -> None:
    assert checked_media(part(), JPEG, "image/jpg").media_type == "image/jpeg"


@pytest.mark.parametrize("sample", TYPES)
def test_a_cut_image_has_a_size_or_none_but_no_other(sample: bytes) -> None:
    for end in range(len(sample)):
        cut = sample[:end]
        found = image_type(cut)
        assert found is None or image_pixels(cut, found) in {None, (13, 7)}


@pytest.mark.parametrize(
    ("data", "said", "reason"),
    [
        (b"MZ" + PNG, "image/png", "content"),
        (PNG, "image/jpeg", "content"),
        (PNG, "image/svg+xml", "content_type"),
        (b"\x80\x04\x95", "application/octet-stream", "content"),
        (PNG[:20], None, "content"),
        (b"\xff\xd8\xff\xda" + bytes(20), None, "content"),
        (JPEG[:2] + b"\xff" * 5000 + JPEG[2:], None, "content"),
        (JPEG[:2] + b"\xff\x00\x00\x0f" + HUGE_FRAME + JPEG[2:], None, "content"),
        (JPEG[:2] + b"\xff\xd9\x00\x0f" + HUGE_FRAME + JPEG[2:], None, "content"),
        (GIF[:6] + bytes(10), None, "content"),
        (PNG[:16] + b"\x7f\xff\xff\xff" * 2 + PNG[24:], None, "pixels"),
        (PNG[:33] + PNG[8:16] + HUGE_SIDES + PNG[24:], None, "content"),
        (GIF[:25] + b"!\xfe\x01a\0," + bytes(4) + b"\x20\x4e\x20\x4e\0", None, "pixels"),
        (GIF[:25] + b"!\xfe" + b"\x01a" * 5000 + GIF[25:], None, "content"),
    ],
)
def test_bytes_that_are_no_allowed_image_are_refused(data: bytes, said: str | None, reason: str) -> None:
    assert reason_of(checked_media, part(), data, said) == reason


@pytest.mark.parametrize("cause", ["size", "bomb"])
def test_an_image_that_decodes_to_more_pixels_than_were_checked_is_refused(
    monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    def bomb(_: object) -> None:
        raise pillow.DecompressionBombError

    monkeypatch.setitem(sys.modules, "PIL.Image", pillow)
    if cause == "bomb":
        monkeypatch.setattr(pillow, "open", bomb)
    media = msgspec.structs.replace(checked_media(part(), PNG, None), data=PNG[:16] + HUGE_SIDES + PNG[24:])
    with pytest.raises(RequestRefused, match="an image that can be decoded"):
        image_of(media)


def test_bytes_are_bounded_together() -> None:
    for bytes_max, rules in ((REQUEST_BYTES_MAX, RULES), (1 << 30, MediaSection(part_bytes_max=1 << 30))):
        check_total(bytes_max, "f", rules)
        with pytest.raises(MediaRefused):
            check_total(bytes_max + 1, "f", rules)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/a?token=secret", "https://h/a"),
        ("https://h/a#secret", "https://h/a"),
        ("https://me:secret@h/a", "https://...@h/a"),
        ("https://secret%40h/a", "https://...@h/a"),
        ("https://me:secret@b@h/a", "https://...@h/a"),
        ("https:me:secret@h/a", "...@h/a"),
        ("https:///me:secret@h/a", "...@h/a"),
        ("https://h\\me:secret@b/a", "https://...@b/a"),
        ("https://h/@name/a.png", "https://h/@name/a.png"),
        ("data:image/png;base64,secret", "data:image/png;base64,..."),
        ("data:secret", "data:..."),
        (" data:image/png;base64,secret", "data:image/png;base64,..."),
        ("da\nta:\x1b,secret", "data:?,..."),
        ("data:" + "a" * 200 + ",secret", "data:" + "a" * 112 + "..."),
        ("http://user:pa#ss@host", "http://..."),
        ("http://user:pa?ss%40host", "http://..."),
        ("a//b//user:secret@h/x", "...@h/x"),
        ("https://h/\n\x1b", "https://h/??"),
        ("/" + "a" * 200, "/" + "a" * 116 + "..."),
    ],
)
def test_what_is_shown_of_an_url_has_no_secret(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_parts_and_media_show_neither_query_nor_bytes() -> None:
    named = part(url=f"{URL}?token=secret")
    assert "secret" not in repr(named)
    media = checked_media(part(url=data_url(PNG)), PNG, None)
    assert "IHDR" not in repr(media)
    assert msgspec.structs.replace(media, data=b"") != media
