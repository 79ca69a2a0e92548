"""Reads the header of `.safetensors` files and checks it before the data is used.

    8 bytes   N, u64 little-endian
    N bytes   JSON in UTF-8 that begins with `{`: name -> {dtype, shape, data_offsets: [begin, end]}
              and `__metadata__`: text -> text; spaces may follow
    the rest  the tensors' bytes, row-major, little-endian; offsets count from its beginning

A name stands once; the tensors cover the rest without hole and overlap; `end - begin` = elements x bytes of an element.
Beyond the format, here: N, the number of tensors and of dimensions are bounded, names are plain, no dimension is 0, and
only the dtypes that embeddings have are taken. Nothing is ever unpickled.
Why not the format's own library: ADR 24.

Source: github.com/huggingface/safetensors, README, section "Format"; dtype names and that the buffer is covered without
holes: its crate's `Dtype` and `SafeTensorError::MetadataIncompleteBuffer`.
"""

import json
import re
from math import prod
from typing import Any

import msgspec

from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import Tensor

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
DIMENSIONS_MAX = 8
_DIMENSION_MAX = 1 << 31
_PREFIX_BYTES = 8
_ALIGNED_BYTES = 8
"""Writers pad the header so that the data begin at a multiple of it."""
_METADATA = "__metadata__"
_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_FOUND_CHARACTERS_MAX = 60


class EmbeddingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a header: its bytes, and its tensors."""

    header_bytes_max: int = 64 << 10
    tensors_max: int = 64


def read_tensors(data: bytes, field: str, limits: EmbeddingLimits) -> tuple[Tensor, ...]:
    """Return the tensors of the file, in the order of their bytes; raise `MediaRefused` (`embeddings_header`)."""
    length = int.from_bytes(data[:_PREFIX_BYTES], "little")
    rest = len(data) - _PREFIX_BYTES
    if rest < 0 or length > min(limits.header_bytes_max, rest):
        found = f"a header of {length} bytes in {len(data)}"
        raise _refused(field, found, f"8 bytes, then a header of at most {limits.header_bytes_max}")
    start = _PREFIX_BYTES + length
    entries = _entries(data[_PREFIX_BYTES:start], field)
    _check_metadata(entries.pop(_METADATA, {}), field)
    if not 0 < len(entries) <= limits.tensors_max:
        raise _refused(field, f"{len(entries)} tensors", f"1..{limits.tensors_max}")
    tensors = sorted((_tensor(name, entry, start, field) for name, entry in entries.items()), key=lambda t: t.begin)
    at = start
    for tensor in tensors:
        if tensor.begin != at:
            raise _refused(field, f"{tensor.name} from byte {tensor.begin}", f"from {at}: no hole and no overlap")
        at = tensor.end
    if at != len(data):
        raise _refused(field, f"{len(data)} bytes", f"{at}, where the last tensor ends")
    return tuple(tensors)


def written_tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Return the file of one tensor, which `read_tensors` takes; `data` are its bytes, row-major, little-endian."""
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


def _tensor(name: str, entry: object, start: int, field: str) -> Tensor:
    if not _NAME.fullmatch(name):
        raise _refused(field, f"the name {name[:_FOUND_CHARACTERS_MAX]!r}", "1..128 of letters, digits, `_`, `.`, `-`")
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise _refused(field, f"{name} with other keys", ", ".join(sorted(_KEYS)))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _refused(field, f"{name} of {str(dtype)[:_FOUND_CHARACTERS_MAX]}", ", ".join(DTYPE_BYTES))
    if not _are_integers(shape, 1, _DIMENSION_MAX) or not 0 < len(shape) <= DIMENSIONS_MAX:
        raise _refused(field, f"the shape of {name}", f"1..{DIMENSIONS_MAX} dimensions, each at least 1")
    if not _are_integers(offsets, 0, 1 << 62) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
        raise _refused(field, f"the offsets of {name}", "[begin, end]")
    begin, end = offsets
    needed = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise _refused(field, f"{end - begin} bytes of {name}", f"{needed}, by its shape and dtype")
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)


def _are_integers(values: object, least: int, most: int) -> bool:
    """Return whether it is a list of integers within bounds; a bool is not an integer, as in JSON."""
    return isinstance(values, list) and all(type(value) is int and least <= value <= most for value in values)


def _refused(field: str, found: str, allowed: str) -> MediaRefused:
    return MediaRefused("embeddings_header", field, found, allowed)
