"""The bytes that tokens' names spell."""

import pytest
from tokenizers import pre_tokenizers

from kv_runtime.text.ranked_tokens import spelt_bytes


@pytest.mark.parametrize(
    ("name", "data"),
    [("<0xE2>", b"\xe2"), ("\u0120a", b" a"), ("\u00e2\u0124", b"\xe2\x82"), ("", b""), ("<0xe2>", b"<0xe2>")],
)
def test_bytes_are_spelt_in_hex_or_a_character_each(name: str, data: bytes) -> None:
    assert spelt_bytes(name) == data


@pytest.mark.parametrize("name", [" a", "\u2581a", "\u65e5"])
def test_other_names_spell_none(name: str) -> None:
    assert spelt_bytes(name) is None


def test_the_characters_are_those_of_the_library() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    spelt = [spelt_bytes(character) for character in alphabet]
    assert sorted(each for each in spelt if each is not None) == [bytes((byte,)) for byte in range(256)]
