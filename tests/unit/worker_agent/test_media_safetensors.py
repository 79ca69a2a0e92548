"""Headers of `.safetensors`: what the format's own package writes is read, everything else has a reason."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_agent.media_samples import SAFETENSORS, reason_of, safetensors
from worker_agent.media.refusals import MediaRefused
from worker_agent.media.safetensors import read_tensor
from worker_agent.port.types import Tensor


def entry(dtype: Any = "F16", shape: Any = (1, 2), offsets: Any = (0, 4), **other: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **other}


def test_what_the_format_s_package_writes_is_read() -> None:
    tensor = Tensor(dtype="F32", shape=(2, 3), begin=72)
    assert read_tensor(SAFETENSORS, "f") == tensor


def test_metadata_are_no_tensor() -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", [1, 2])}
    assert read_tensor(safetensors(header, bytes(4)), "f").dtype == "BF16"


@pytest.mark.parametrize(
    "data",
    [
        b"\x02",
        ((64 << 10) + 1).to_bytes(8, "little") + b"{}" + b" " * (64 << 10),
        (3).to_bytes(8, "little") + b"{}",
        safetensors("[]"),
        safetensors("{"),
        safetensors("{}"),
        safetensors({"__metadata__": {"a": 1}, "x": entry()}, bytes(4)),
        safetensors({"__metadata__": [], "x": entry()}, bytes(4)),
        safetensors({"x": 1}),
        safetensors({"x": {"dtype": "F16", "shape": [1, 2]}}),
        safetensors({"x": entry(offsets=[0, 4], more=1)}, bytes(4)),
        safetensors({"x": entry("F64", [1, 1], [0, 8])}, bytes(8)),
        safetensors({"x": entry(["F16"])}, bytes(4)),
        safetensors({"x": entry(shape=[0, 1], offsets=[0, 0])}),
        safetensors({"x": entry(shape=[-1, -2])}, bytes(4)),
        safetensors({"x": entry(shape=[True, 2])}, bytes(4)),
        safetensors({"x": entry(shape=[1, 2.0])}, bytes(4)),
        safetensors({"x": entry(shape="12")}, bytes(4)),
        safetensors({"x": entry(shape=[2])}, bytes(4)),
        safetensors({"x": entry(shape=[1, 1, 2], offsets=[0, 4])}, bytes(4)),
        safetensors({"x": entry(offsets=[4, 0])}, bytes(4)),
        safetensors({"x": entry(offsets=None)}, bytes(4)),
        safetensors({"x": entry(offsets=[1, 5])}, bytes(5)),
        safetensors({"x": entry()}, bytes(3)),
        safetensors({"x": entry()}, bytes(5)),
        safetensors({"x": entry(), "y": entry()}, bytes(4)),
        safetensors('{"x":{"dtype":"F16","shape":[1,' + "9" * 500 + '],"data_offsets":[0,4]}}', bytes(4)),
    ],
)
def test_another_file_is_refused(data: bytes) -> None:
    assert reason_of(read_tensor, data, "f") == "embeddings_header"


@given(st.integers(0, len(SAFETENSORS) - 1), st.integers(1, 255))
def test_a_file_with_another_byte_is_refused_or_within_its_bytes(at: int, flip: int) -> None:
    data = bytearray(SAFETENSORS)
    data[at] ^= flip
    try:
        tensor = read_tensor(bytes(data), "f")
    except MediaRefused:
        return
    assert 8 < tensor.begin < len(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(MediaRefused):
        read_tensor(data, "f")
