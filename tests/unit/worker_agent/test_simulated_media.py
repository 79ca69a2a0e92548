import pytest

from tests.unit.worker_agent.media_samples import PNG, SAFETENSORS
from worker_agent.engines.simulated.engine import embedding_files, encoded
from worker_agent.media.parts import content_digest
from worker_agent.media.safetensors import EmbeddingLimits, read_tensors
from worker_agent.port.types import Media, MediaKind, RequestRefused


def media(kind: MediaKind, data: bytes) -> Media:
    return Media(field="f", kind=kind, media_type="image/png", data=data, digest=content_digest(data))


def test_a_file_is_one_tensor_that_its_image_s_digest_fills() -> None:
    one, other = media("image", PNG), media("image", PNG[:-1])
    files = embedding_files([one, other])
    tensors = [read_tensors(data, "f", EmbeddingLimits()) for data in files]
    assert [[(each.dtype, each.shape) for each in tensor] for tensor in tensors] == [[("F16", (2, 16))]] * 2
    assert files[0] != files[1]
    assert files == embedding_files([one, other])


@pytest.mark.parametrize(
    "items", [[], [media("embeddings", SAFETENSORS)], [media("image", PNG)] * 2 + [media("embeddings", b"")]]
)
def test_what_is_no_image_is_not_encoded(items: list[Media]) -> None:
    with pytest.raises(RequestRefused, match=r"^media: found .*, allowed images, one or more"):
        encoded(items)
