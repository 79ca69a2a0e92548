"""Media as engines take them: digests in their own words, and files of one tensor."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.media.inputs import digest_words, with_digests
from worker_agent.media.parts import content_digest
from worker_agent.media.safetensors import read_tensor, written_tensor
from worker_agent.port.handoff import Handoff

HANDLES = Handoff(multimodal_embedding_handles=({"k": 1}, {"k": 2}), multimodal_hashes=((0,) * 8, (0,) * 8))


@given(st.binary(min_size=32, max_size=32))
def test_words_are_the_digest_s_eight_signed_ints(data: bytes) -> None:
    told = digest_words(data.hex())
    assert struct.pack(">8i", *told) == data


def test_an_encoder_s_hashes_become_the_digests_of_the_very_bytes() -> None:
    digests = [content_digest(b"a"), content_digest(b"b")]
    told = with_digests(HANDLES, digests)
    assert told.multimodal_hashes == tuple(map(digest_words, digests))
    assert told.multimodal_embedding_handles == HANDLES.multimodal_embedding_handles


@pytest.mark.parametrize(("dtype", "size"), [("F32", 4), ("F16", 2), ("BF16", 2)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5)])
def test_a_file_that_is_written_is_read_back(dtype: str, size: int, shape: tuple[int, int]) -> None:
    data = bytes(range(shape[0] * shape[1] * size))
    file = written_tensor(dtype, shape, data)
    tensor = read_tensor(file, "f")
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert file[tensor.begin :] == data
    assert tensor.begin % 8 == 0
