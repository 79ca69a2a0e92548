"""Small images and embeddings. Images of 13 x 7 pixels as Pillow 13.0 writes them, a file as safetensors 0.8.0 does."""

import base64
import json
from collections.abc import Callable
from typing import Any, get_args

import pytest

from worker_agent.media.refusals import MediaReason, MediaRefused

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000d0000000708020000005c12504d0000000d49444154789c63601805d8000001180001c95e"
    "dcd30000000049454e44ae426082"
)
GIF = bytes.fromhex(
    "4749463837610d0007008100000000000000000000000000002c000000000d0007000008110001081c48b0a0c18308132a5cc8b06140003b"
)
WEBP_LOSSY = bytes.fromhex("52494646240000005745425056503820180000003001009d012a0d0007000cc0ce25a400037000feec670000")
WEBP_LOSSLESS = bytes.fromhex("524946461a000000574542505650384c0e0000002f0c800100071011fd0f4444ff03")
WEBP_EXTENDED = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0" + bytes([0x10, 0, 0, 0, 12, 0, 0, 6, 0, 0])
JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffdb000400ffffffc0000b080007000d01011100ffd9")
SAFETENSORS = bytes.fromhex(
    "40000000000000007b2278223a7b226474797065223a22463332222c227368617065223a5b322c335d2c22646174615f6f66667365747322"
    "3a5b302c32345d7d7d20202020202020000000000000803f0000004000004040000080400000a040"
)
"""One tensor `x`, F32 of 2 x 3."""


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """A file with this header, JSON or text that is meant to be some."""
    encoded = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def image_part(url: Any, **keys: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **keys}}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def reason_of(read: Callable[..., object], *given: Any) -> str:
    """Return why `read` refuses what it is given."""
    with pytest.raises(MediaRefused) as caught:
        read(*given)
    return refused(caught)


def refused(caught: pytest.ExceptionInfo[MediaRefused]) -> str:
    """The reason, which is one of the list; the message names what was found and what is allowed."""
    assert caught.value.reason in get_args(MediaReason)
    assert ": found " in str(caught.value)
    assert ", allowed " in str(caught.value)
    return caught.value.reason
