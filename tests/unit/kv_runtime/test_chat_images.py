"""Image parts leave a chat: what stands in their place, and what is refused."""

from typing import Any

import pytest

from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.chat_messages import (
    IMAGE,
    IMAGES_MAX,
    UNKNOWN_FROM_HERE,
    HasImages,
    TextError,
    prepared_messages,
    split_images,
)
from kv_runtime.text.chat_template import ChatTemplate

PLACEHOLDER = "<image>"
LOOPS = (
    "{%- for message in messages %}[{{ message.role }}]"
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|image|>{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endfor %}"
)
JOINS = "{%- for message in messages %}[{{ message.role }}]{{ message.content }}{%- endfor %}"


def text(said: Any) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(url: Any = "data:,1") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_a_placeholder_stands_where_each_image_stood() -> None:
    split = split_images([{"role": "system", "content": "s"}, *chat(text("a"), image("u"), image("v"))], PLACEHOLDER)
    assert split.urls == ("u", "v")
    assert split.messages == [
        {"role": "system", "content": "s"},
        *chat(text("a"), text(PLACEHOLDER), text(PLACEHOLDER)),
    ]


def test_the_clients_messages_stay_as_they_were() -> None:
    asked = chat(text("a"), image())
    split_images(asked, PLACEHOLDER)
    split_images(asked, "")
    assert asked == chat(text("a"), image())


def test_for_an_unknown_model_the_mark_is_before_the_first_message_with_an_image() -> None:
    split = split_images([*chat(text("a")), *chat(text("b"), image("u")), *chat(image("v"))], "")
    assert split.urls == ("u", "v")
    assert split.messages == [*chat(text("a")), *chat(text(UNKNOWN_FROM_HERE), text("b"), IMAGE), *chat(IMAGE)]


@pytest.mark.parametrize(("template", "expected"), [(LOOPS, "a<|image|>b"), (JOINS, "\na\n\nb")])
def test_a_template_sees_images_as_it_was_written_to(template: str, expected: str) -> None:
    split = split_images(chat(text("a"), image(), text("b")), "")
    rendered = ChatTemplate({"default": template}, {}).render(split.messages)
    assert rendered == f"[user]{UNKNOWN_FROM_HERE}{expected}"


def test_a_placeholder_is_text_to_every_template() -> None:
    split = split_images(chat(text("a"), image(), text("b")), PLACEHOLDER)
    assert ChatTemplate({"default": LOOPS}, {}).render(split.messages) == "[user]a<image>b"
    assert ChatTemplate({"default": JOINS}, {}).render(split.messages) == "[user]a\n<image>\nb"


@pytest.mark.parametrize("template", [LOOPS, JOINS])
def test_a_chat_whose_images_are_still_in_it_is_told_apart_from_other_mistakes(template: str) -> None:
    with pytest.raises(HasImages, match=r"messages\[0\]\.content\[1\]\.type: found 'image_url', allowed \"text\""):
        ChatTemplate({"default": template}, {}).render(chat(text("a"), image()))
    with pytest.raises(HasImages):
        ByteText().pack_chat(chat(image()))


@pytest.mark.parametrize("part", [dict(IMAGE), {"type": "input_audio"}, {"type": "video_url"}])
def test_from_other_media_on_nothing_is_known(part: dict[str, Any]) -> None:
    with pytest.raises(HasImages):
        prepared_messages(chat(part))
    split = split_images([*chat(text("a"), image("u")), *chat(text("b"), part)], PLACEHOLDER)
    assert (split.urls, split.other_media) == (("u",), "messages[1].content[1].type")
    assert split.messages == [*chat(text(UNKNOWN_FROM_HERE), text("a"), IMAGE), *chat(text("b"), IMAGE)]


@pytest.mark.parametrize("template", [LOOPS, JOINS])
def test_characters_that_cannot_be_are_blamed_in_a_chat_with_images_too(template: str) -> None:
    split = split_images(chat(image(), text("a\ud800")), "")
    with pytest.raises(TextError, match="lone surrogates"):
        ChatTemplate({"default": template}, {}).render(split.messages)


def test_a_final_image_cannot_be_continued() -> None:
    split = split_images(chat(text("a"), image()), "")
    with pytest.raises(TextError, match="continue_final_message"):
        ChatTemplate({"default": LOOPS}, {}).render(split.messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url"},
            "messages[0].content[0].image_url: found None, allowed an object whose `url` is a string, not empty",
        ),
        ({"type": "image_url", "image_url": "u"}, "messages[0].content[0].image_url: found 'u', allowed an object"),
        (image(""), "messages[0].content[0].image_url: found {'url': ''}, allowed an object whose `url` is a string"),
        (image(7), "messages[0].content[0].image_url: found {'url': 7}, allowed an object whose `url` is a string"),
        (
            text("look: <image>"),
            "messages[0].content[0].text: found '<image>', allowed text without what stands for an image",
        ),
    ],
)
def test_a_part_that_cannot_be_is_named(part: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError) as refused:
        split_images(chat(part, image()), PLACEHOLDER)
    assert str(refused.value).startswith(message)


def test_a_plain_text_may_not_say_the_placeholder_either() -> None:
    asked = [{"role": "system", "content": "an <image> is"}, *chat(image())]
    with pytest.raises(TextError, match=r"^messages\[0\]\.content: found '<image>'"):
        split_images(asked, PLACEHOLDER)
    assert split_images(asked, "").messages[0] == asked[0], "without a placeholder, any text is allowed"


@pytest.mark.parametrize("placeholder", [PLACEHOLDER, ""])
def test_a_chat_has_a_bounded_number_of_images(placeholder: str) -> None:
    assert len(split_images(chat(*[image()] * IMAGES_MAX), placeholder).urls) == IMAGES_MAX
    with pytest.raises(TextError, match=r"content\[128\]: found 'more than 128 images', allowed at most 128"):
        split_images(chat(*[image()] * (IMAGES_MAX + 1)), placeholder)


@pytest.mark.parametrize("part", [7, None, {"type": "poem"}, text(7)])
def test_other_parts_are_left_to_the_renderer_of_the_chat(part: Any) -> None:
    split = split_images(chat(image(), part), PLACEHOLDER)
    assert split.messages[0]["content"][1] is part
    with pytest.raises(TextError):
        prepared_messages(split.messages)
