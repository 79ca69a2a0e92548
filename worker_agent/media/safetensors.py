"""Reads the header of `.safetensors` files and checks it before the data is used.

    8 bytes   N, u64 little-endian
    N bytes   a JSON object in UTF-8: name -> {dtype, shape, data_offsets: [begin, end]}
              and `__metadata__`: text -> text; spaces may follow
    the rest  the tensors' bytes, row-major, little-endian; offsets count from its beginning

The tensors cover the rest without hole and overlap; `end - begin` = elements x bytes of an element.
More is required here than by the format: N is bounded; there is one tensor, with two dimensions above 0; its dtype is
one that embeddings have. Nothing is ever unpickled.
Why not the format's own library: ADR 24.

Source: github.com/huggingface/safetensors, README, section "Format"; dtype names and that the buffer is covered without
holes: its crate's `Dtype` and `SafeTensorError::MetadataIncompleteBuffer`.
"""

from math import prod
from typing import Annotated, Literal

import msgspec

from kv_protocol.errors import UNDECODABLE
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import Tensor

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PREFIX_BYTES = 8
_HEADER_BYTES_MAX = 64 << 10
_ALIGNED_BYTES = 8
"""Writers pad the header so that the data begin at a multiple of this number."""
_Dimension = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in the header. `shape` is the number of tokens, and the model's width."""

    dtype: Literal["F32", "F16", "BF16"]
    shape: tuple[_Dimension, _Dimension]
    data_offsets: tuple[int, int]


def read_tensor(data: bytes, field: str) -> Tensor:
    """Return the file's one tensor, of two dimensions; raise `MediaRefused` (`embeddings_header`)."""
    length = int.from_bytes(data[:_PREFIX_BYTES], "little")
    start = _PREFIX_BYTES + length
    if start > len(data) or length > _HEADER_BYTES_MAX:
        found = f"a header of {length} bytes in {len(data)}"
        raise _refused(field, found, f"8 bytes, then a header of at most {_HEADER_BYTES_MAX}")
    entries = _entries(data[_PREFIX_BYTES:start], field)
    if len(entries) != 1:
        raise _refused(field, f"{len(entries)} tensors", "one")
    (entry,) = entries
    needed = prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    if entry.data_offsets != (0, needed):
        raise _refused(field, "other offsets", f"[0, {needed}], by shape and dtype")
    if len(data) - start != needed:
        raise _refused(field, f"{len(data)} bytes", f"{start + needed}, where the tensor ends")
    return Tensor(dtype=entry.dtype, shape=entry.shape, begin=start)


def written_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Return the file of one tensor, which `read_tensor` takes; `data` are its bytes, row-major, little-endian."""
    assert len(data) == prod(shape) * DTYPE_BYTES[dtype]
    entry = {"dtype": dtype, "shape": shape, "data_offsets": (0, len(data))}
    header = msgspec.json.encode({"embeddings": entry})
    header += b" " * (-len(header) % _ALIGNED_BYTES)
    return len(header).to_bytes(_PREFIX_BYTES, "little") + header + data


def _entries(header: bytes, field: str) -> list[_Entry]:
    """Return the tensors; raise `MediaRefused` unless the metadata are texts."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
        return [msgspec.json.decode(each, type=_Entry) for each in entries.values()]
    except UNDECODABLE as error:
        allowed = f"JSON as the format has it, of a tensor of two dimensions and {' or '.join(DTYPE_BYTES)}"
        raise _refused(field, f"a header that cannot be read ({error})", allowed) from error


def _refused(field: str, found: str, allowed: str) -> MediaRefused:
    return MediaRefused("embeddings_header", field, found, allowed)
