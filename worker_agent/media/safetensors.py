"""Reads the header of `.safetensors` files and checks it before the data is used.

    8 bytes   N, u64 little-endian
    N bytes   JSON in UTF-8 that begins with `{`: name -> {dtype, shape, data_offsets: [begin, end]}
              and `__metadata__`: text -> text; spaces may follow
    the rest  the tensors' bytes, row-major, little-endian; offsets count from its beginning

A name stands once; the tensors cover the rest without hole and overlap; `end - begin` = elements x bytes of an element.
Beyond the format, here: N is bounded, there is one tensor, it has two dimensions, none is 0, and only the dtypes that
embeddings have are taken. Nothing is ever unpickled.
Why not the format's own library: ADR 24.

Source: github.com/huggingface/safetensors, README, section "Format"; dtype names and that the buffer is covered without
holes: its crate's `Dtype` and `SafeTensorError::MetadataIncompleteBuffer`.
"""

import json
from math import prod
from typing import Any

import msgspec

from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import Tensor

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_DIMENSIONS = 2
_DIMENSION_MAX = 1 << 31
_PREFIX_BYTES = 8
_HEADER_BYTES_MAX = 64 << 10
_ALIGNED_BYTES = 8
"""Writers pad the header so that the data begin at a multiple of it."""
_METADATA = "__metadata__"
_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_FOUND_CHARACTERS_MAX = 60


def read_tensor(data: bytes, field: str) -> Tensor:
    """Return the file's one tensor, of two dimensions; raise `MediaRefused` (`embeddings_header`)."""
    length = int.from_bytes(data[:_PREFIX_BYTES], "little")
    rest = len(data) - _PREFIX_BYTES
    if rest < 0 or length > min(_HEADER_BYTES_MAX, rest):
        found = f"a header of {length} bytes in {len(data)}"
        raise _refused(field, found, f"8 bytes, then a header of at most {_HEADER_BYTES_MAX}")
    start = _PREFIX_BYTES + length
    entries = _entries(data[_PREFIX_BYTES:start], field)
    _check_metadata(entries.pop(_METADATA, {}), field)
    if len(entries) != 1:
        raise _refused(field, f"{len(entries)} tensors", "one")
    ((name, entry),) = entries.items()
    return _tensor(name, entry, start, len(data), field)


def written_tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Return the file of one tensor, which `read_tensor` takes; `data` are its bytes, row-major, little-endian."""
    assert len(data) == prod(shape) * DTYPE_BYTES[dtype]
    entry = {"dtype": dtype, "shape": shape, "data_offsets": (0, len(data))}
    header = msgspec.json.encode({name: entry})
    header += b" " * (-len(header) % _ALIGNED_BYTES)
    return len(header).to_bytes(_PREFIX_BYTES, "little") + header + data


def _entries(header: bytes, field: str) -> dict[str, Any]:
    try:
        if not header.startswith(b"{"):
            raise ValueError("it does not begin with {")  # noqa: TRY301 - one message for whatever is wrong with it
        entries = json.loads(header.decode().rstrip(" "), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise _refused(field, f"a header that cannot be read ({error})", "JSON as the format has it") from error
    assert isinstance(entries, dict)
    return entries


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _check_metadata(metadata: object, field: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refused(field, f"{_METADATA} of {type(metadata).__name__}", "text by name")


def _tensor(name: str, entry: object, start: int, end: int, field: str) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise _refused(field, "a tensor with other keys", ", ".join(sorted(_KEYS)))
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _refused(field, f"a tensor of {str(dtype)[:_FOUND_CHARACTERS_MAX]}", ", ".join(DTYPE_BYTES))
    if not _are_integers(shape, 1, _DIMENSION_MAX) or len(shape) != _DIMENSIONS:
        raise _refused(field, str(shape)[:_FOUND_CHARACTERS_MAX], "two dimensions: tokens, and the model's width")
    needed = prod(shape) * DTYPE_BYTES[dtype]
    if not _are_integers(offsets := entry["data_offsets"], 0, needed) or offsets != [0, needed]:
        raise _refused(field, "other offsets", f"[0, {needed}], by shape and dtype")
    if end - start != needed:
        raise _refused(field, f"{end} bytes", f"{start + needed}, where the tensor ends")
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), begin=start, end=end)


def _are_integers(values: object, least: int, most: int) -> bool:
    """Return whether it is a list of integers within bounds; a bool is not an integer, as in JSON."""
    return isinstance(values, list) and all(type(value) is int and least <= value <= most for value in values)


def _refused(field: str, found: str, allowed: str) -> MediaRefused:
    return MediaRefused("embeddings_header", field, found, allowed)
