"""The bytes of a token by its name, for tokens that are not complete characters.

    <0xE2>         the byte: vocabularies with byte fallback
    âĢ             a character for each byte: byte-level vocabularies. Printable Latin-1 stands for itself; the other
                   bytes, in turn, are the characters from U+0100 on

Source: the `tokenizers` library, `ByteFallback` and `ByteLevel`; GPT-2's `bytes_to_unicode`.
"""

import re

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def spelt_bytes(name: str) -> bytes | None:
    """Return the bytes; None if the name is of neither kind."""
    if spelt := _FALLBACK.fullmatch(name):
        return bytes.fromhex(spelt[1])
    try:
        return bytes(_BYTES[character] for character in name)
    except KeyError:
        return None


def spelt(token: bytes) -> str:
    """Return the name of a token of a byte-level vocabulary."""
    return token.decode("latin-1").translate(_CHARACTERS)


def _bytes_of_characters() -> dict[str, int]:
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _bytes_of_characters()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}
