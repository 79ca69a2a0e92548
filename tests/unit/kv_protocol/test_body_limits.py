"""Large bodies: what is refused, by which name, what is free, and that nothing is lost of what is let in."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.body_limits import Body, BodyLimits, read_body
from kv_protocol.openai.errors import BodyTooLarge, RequestInvalid

LIMITS = BodyLimits(prompt_bytes_max=4000, options_bytes_max=1000, values_max=100)
IMAGE = "data:image/png;base64," + "QUJD" * 3000


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def read(data: bytes | bytearray, limits: BodyLimits = LIMITS) -> Body:
    return read_body(data, limits, "mark")


def image_part(url: str = IMAGE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any) -> bytes:
    return body(messages=[{"role": "user", "content": list(parts)}])


def test_what_is_beyond_a_bound_is_named_with_the_bound() -> None:
    for data, field, allowed in (
        (body(messages=[[]] * 101), "body", "100"),
        (body(tools=[{"a": 0}] * 51), "body", "100"),
        (body(logit_bias={str(key): 0 for key in range(101)}), "body", "100"),
        (body(messages=[{"a": [1.5] * 101}]), "body", "100"),
        (body(prompt=['a,"'] * 101), "body", "100"),
        (body(input=[[1]] * 101), "body", "100"),
        (body(**{str(key): 0 for key in range(101)}), "body", "100"),
        (body(messages="x" * 4001), "messages", "4000 (data.prompt_bytes_max)"),
        (body(messages=['"' * 2001]), "messages", "4000 (data.prompt_bytes_max)"),
        (body(messages=["x" * 2500], documents=["x" * 2500]), "documents", "4000 (data.prompt_bytes_max)"),
        (body(prompt=[1] * 1001), "body", "1000 (data.prompt_bytes_max / 4)"),
        (body(prompt=[1] * 500, prompt_token_ids=[1] * 501), "body", "1000 (data.prompt_bytes_max / 4)"),
        (body(input=[[1] * 500, [2] * 501]), "body", "1000 (data.prompt_bytes_max / 4)"),
        (body(nvext={"token_data": [1] * 1001}), "body", "1000 (data.prompt_bytes_max / 4)"),
        (body(input=["x" * 2001, "x" * 2001]), "input", "4000 (data.prompt_bytes_max)"),
        (body(input="x" * 2001, instructions="x" * 2001), "instructions", "4000 (data.prompt_bytes_max)"),
        (body(prompt=[10**9] * 900), "prompt", "8000 (data.prompt_bytes_max x 2)"),
        (body(nvext={"token_data": [10**9] * 900}), "nvext.token_data", "8000 (data.prompt_bytes_max x 2)"),
        (body(prompt=["x" * 4001]), "prompt", "4000 (data.prompt_bytes_max)"),
        (body(guided_json={"a": "x" * 1001}), "guided_json", "1000"),
        (body(user="x" * 600, metadata={"a": "x" * 600}), "metadata", "1000"),
        (body(prompt="x" * 20_000), "body", "13000 (data.prompt_bytes_max)"),
        (b'{"%b":1}' % (b"k" * 1001), "body", "1000"),
        (b" " * 1001 + b"{}", "body", "1000"),
        (b"{}" + b" " * 1001, "body", "1000"),
        (b'{"seed":' + b"1" * 1001 + b"}", "seed", "1000"),
    ):
        with pytest.raises(BodyTooLarge) as refused:
            read(data)
        assert (refused.value.field, str(refused.value).rpartition("at most ")[2]) == (field, allowed), data[:80]


def test_counts_do_not_depend_on_where_a_slice_ends() -> None:
    limits = BodyLimits(prompt_bytes_max=4 << 18, options_bytes_max=1 << 20, values_max=70_000)
    for before in range(9):
        texts, ids = (
            body(messages=["x" * before, *['\\",['] * 60_000]),
            body(user="x" * before, prompt=[10] * (1 << 18)),
        )
        read(texts, limits)
        read(ids, limits)
        fewer = limits._replace(values_max=60_000, prompt_bytes_max=(4 << 18) - 4)
        for data in (texts, ids):
            with pytest.raises(BodyTooLarge, match=r"more than (60000 values|262143 token ids)"):
                read(data, fewer)


def test_of_a_long_key_the_beginning_is_named() -> None:
    with pytest.raises(BodyTooLarge) as refused:
        read(body(**{"k" * 900: "x" * 900}))
    assert refused.value.field == "k" * 80 + "..."


def test_a_body_is_read_no_further_than_to_the_bound() -> None:
    with pytest.raises(BodyTooLarge):
        read(b'{"tools":[' + b"[]," * 101 + b'"no JSON from here on')


@pytest.mark.parametrize(
    "data", [b'{"a":1', b'{"a', b'{"a":"b\\', b'{"a":[1,', b'{"a" 1}', b"{1:2}", b'{"a":}', b"{,}"]
)
def test_what_cannot_be_followed_is_no_json(data: bytes) -> None:
    with pytest.raises(RequestInvalid, match="JSON"):
        read(data)


def test_all_bounds_can_be_reached() -> None:
    read(body(prompt=[1] * 1000))
    read(body(input=[[1] * 400, [2] * 600]))
    read(body(messages=["x" * 3990], tools=[""] * 90))
    read(body(prompt=[7] * 1000, messages="x" * 3900))


def test_images_count_for_nothing_and_stay_what_they_are() -> None:
    data = chat(image_part(), {"type": "text", "text": "hi"}, image_part(IMAGE + "REVG"))
    made = read(bytearray(data))
    urls = [part["image_url"]["url"] for part in json.loads(made.text)["messages"][0]["content"][::2]]
    assert len(made.text) < 500
    assert [bytes(made.base64_of(url) or b"") for url in urls] == [b"QUJD" * 3000, b"QUJD" * 3000 + b"REVG"]
    assert b"".join(made.with_images(made.text)) == data


def test_white_space_between_an_image_and_its_key_changes_nothing() -> None:
    data = chat(image_part()).replace(b'"url": ', b'"url" \n:' + b" " * 70)
    assert [len(image) for image in read(data).images.values()] == [12000]


@pytest.mark.parametrize("part", [{"type": "text", "text": IMAGE}, IMAGE], ids=["a part", "a content"])
def test_a_text_that_looks_like_an_image_stays_text(part: Any) -> None:
    with pytest.raises(BodyTooLarge, match="prompt_bytes_max"):
        read(chat(part))


@pytest.mark.parametrize("length", [(256 << 10) - 4, 256 << 10, (256 << 10) + 4, 512 << 10])
@pytest.mark.parametrize("key", ["image_url", "file_data"])
def test_an_image_may_have_any_length(length: int, key: str) -> None:
    data = body(input=[{"type": "input_image", key: "data:image/png;base64," + "A" * length}])
    assert [len(image) for image in read(data).images.values()] == [length]


def test_an_image_may_begin_anywhere_in_a_slice() -> None:
    for before in range(0, 500, 7):
        data = body(
            user="x" * ((64 << 10) - before), messages=[image_part(), {"data:": {"url": ";base64," + "A" * 5000}}]
        )
        made = read(data, LIMITS._replace(prompt_bytes_max=1 << 20, options_bytes_max=1 << 20))
        assert [len(image) for image in made.images.values()] == [12000]


def escaped(data: bytes) -> bytes:
    return data.replace(b"/", rb"\/")


@pytest.mark.parametrize("before", range(6))
def test_a_slash_of_an_image_may_be_escaped(before: int) -> None:
    image = "A" * before + "QU/D/+//" * (300 << 7)
    data = chat(image_part("data:image/png;base64," + image))
    made = read(escaped(data))
    (part,) = json.loads(made.text)["messages"][0]["content"]
    assert len(made.text) < 500
    assert bytes(made.base64_of(part["image_url"]["url"]) or b"").decode() == image
    assert b"".join(made.with_images(made.text)) == escaped(data)


@pytest.mark.parametrize("escape", [rb"\u002f", rb"\\/", rb"\n", rb"\\", rb"\/\n"])
def test_an_image_with_other_escapes_is_text(escape: bytes) -> None:
    data = chat(image_part(IMAGE + "/" + "QUJD" * 1000)).replace(b"/QUJD", escape + b"QUJD", 1)
    with pytest.raises(BodyTooLarge, match="prompt_bytes_max"):
        read(data)


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64," + "QUJD" * 10, "data:image/png," + "QUJD" * 300, IMAGE[:2000] + "\\", "é" + IMAGE[:3000]],
)
def test_other_urls_are_text(url: str) -> None:
    made = read(chat(image_part(url)))
    assert (made.images, bytes(made.text)) == ({}, chat(image_part(url)))
    assert made.base64_of(url) is None


def test_a_name_that_a_client_wrote_is_not_taken_for_an_image() -> None:
    data = chat({"type": "text", "text": "kv-cut-mark-7 kv-cut-other-0"}, image_part())
    made = read(data)
    assert b"".join(made.with_images(made.text)) == data


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)
_KEYS = ("model", "messages", "prompt", "prompt_token_ids", "nvext", "tools")


@given(
    st.dictionaries(st.sampled_from(_KEYS) | st.text(), _json, max_size=6), st.booleans(), st.sampled_from([None, 1])
)
def test_every_small_object_passes_as_it_is(fields: dict[str, Any], is_ascii: bool, indent: int | None) -> None:
    data = json.dumps(fields, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "surrogatepass")
    assert bytes(read_body(data, BodyLimits(), "mark").text) == data
