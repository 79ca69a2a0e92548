"""Headers of `.safetensors`: what the format's own package writes is read, everything else has a reason."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_agent.media_samples import SAFETENSORS, refused, safetensors
from worker_agent.media.refusals import MediaRefused
from worker_agent.media.safetensors import EmbeddingLimits, read_tensors
from worker_agent.port.types import Tensor

LIMITS = EmbeddingLimits(header_bytes_max=1024, tensors_max=3)


def entry(dtype: Any = "F16", shape: Any = (2,), offsets: Any = (0, 4), **other: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **other}


def test_what_the_format_s_package_writes_is_read() -> None:
    tensor = Tensor(name="x", dtype="F32", shape=(2, 3), begin=72, end=96)
    assert read_tensors(SAFETENSORS, "f", LIMITS) == (tensor,)


def test_tensors_come_in_the_order_of_their_bytes_and_metadata_are_none() -> None:
    header = {"b": entry("BF16", [1, 2], [8, 12]), "a": entry("F32", [2], [0, 8]), "__metadata__": {"format": "pt"}}
    data = safetensors(header, bytes(12))
    assert [tensor.name for tensor in read_tensors(data, "f", LIMITS)] == ["a", "b"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        (2**63).to_bytes(8, "little") + b"{}",
        (1025).to_bytes(8, "little") + b"{" + b" " * 1024,
        (3).to_bytes(8, "little") + b"{}",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00.",
        safetensors(""),
        safetensors(" {}"),
        safetensors("[]"),
        safetensors("{"),
        safetensors("{}\n"),
        safetensors("{}"),
        safetensors({"__metadata__": {}}),
        safetensors('{"a":' * 200 + "1" + "}" * 200),
        safetensors({"__metadata__": {"a": 1}, "x": entry()}, bytes(4)),
        safetensors({"__metadata__": [], "x": entry()}, bytes(4)),
        safetensors(
            '{"x":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"x":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}',
            bytes(4),
        ),
        safetensors('{"x":{"dtype":"F16","dtype":"F16","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
        safetensors({"x": 1}),
        safetensors({"x": {"dtype": "F16", "shape": [2]}}),
        safetensors({"x": entry(offsets=[0, 4], more=1)}, bytes(4)),
        safetensors({"x": entry("F64", [1], [0, 8])}, bytes(8)),
        safetensors({"x": entry(["F16"])}, bytes(4)),
        safetensors({"x": entry(shape=[])}, bytes(4)),
        safetensors({"x": entry(shape=[0], offsets=[0, 0])}),
        safetensors({"x": entry(shape=[-1])}, bytes(4)),
        safetensors({"x": entry(shape=[True, 2])}, bytes(4)),
        safetensors({"x": entry(shape=[2.0])}, bytes(4)),
        safetensors({"x": entry(shape="2")}, bytes(4)),
        safetensors({"x": entry(shape=[1] * 9, offsets=[0, 2])}, bytes(2)),
        safetensors({"x": entry(shape=[1 << 31] * 8, offsets=[0, 4])}, bytes(4)),
        safetensors({"x": entry(offsets=[0, 5])}, bytes(5)),
        safetensors({"x": entry(offsets=[4, 0])}, bytes(4)),
        safetensors({"x": entry(offsets=[-4, 0])}, bytes(4)),
        safetensors({"x": entry(offsets=[0, 4, 8])}, bytes(4)),
        safetensors({"x": entry(offsets=[0])}, bytes(4)),
        safetensors({"x": entry(offsets=None)}, bytes(4)),
        safetensors({"x": entry(offsets=[1, 5])}, bytes(5)),
        safetensors({"x": entry()}, bytes(3)),
        safetensors({"x": entry()}, bytes(5)),
        safetensors({"x": entry(), "y": entry()}, bytes(4)),
        safetensors({"x": entry(), "y": entry(offsets=[2, 6])}, bytes(6)),
        safetensors({"x": entry(), "y": entry(offsets=[5, 9])}, bytes(9)),
        safetensors({"": entry()}, bytes(4)),
        safetensors({"../x": entry()}, bytes(4)),
        safetensors({"x" * 129: entry()}, bytes(4)),
        safetensors({str(n): entry(offsets=[4 * n, 4 * n + 4]) for n in range(4)}, bytes(16)),
        safetensors('{"x":{"dtype":"F16","shape":[1e999],"data_offsets":[0,4]}}', bytes(4)),
        safetensors('{"x":{"dtype":"F16","shape":[' + "9" * 500 + '],"data_offsets":[0,4]}}', bytes(4)),
    ],
)
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused) as caught:
        read_tensors(data, "f", LIMITS)
    assert refused(caught) == "embeddings_header"


@given(st.integers(0, len(SAFETENSORS) - 1), st.integers(1, 255))
def test_a_file_with_another_byte_is_refused_or_within_its_bytes(at: int, flip: int) -> None:
    data = bytearray(SAFETENSORS)
    data[at] ^= flip
    try:
        tensors = read_tensors(bytes(data), "f", LIMITS)
    except MediaRefused:
        return
    assert tensors[-1].end == len(data)
    assert all(8 < tensor.begin < tensor.end for tensor in tensors)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused):
        read_tensors(data, "f", LIMITS)
