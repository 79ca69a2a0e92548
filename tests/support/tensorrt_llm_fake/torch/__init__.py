"""As much of torch as the agent uses, over numpy, on the CPU: it comes with TensorRT-LLM.

bfloat16 is 16 bits without arithmetic. Source: PyTorch's reference, `torch.frombuffer`, `torch.zeros`, `torch.Tensor`.
"""

from typing import Any, Self

import numpy as np


class dtype:  # noqa: N801  as the real one
    """An element type; there is one of each."""

    def __init__(self, name: str, numpy_type: str) -> None:
        self.name, self.numpy_type = name, np.dtype(numpy_type)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


float32, float16, bfloat16 = dtype("float32", "<f4"), dtype("float16", "<f2"), dtype("bfloat16", "<u2")
float64, uint8 = dtype("float64", "<f8"), dtype("uint8", "u1")


class Tensor:
    """Elements of one type, row-major."""

    def __init__(self, elements: Any, kind: dtype) -> None:
        self._elements, self.dtype = elements, kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of each dimension."""
        return tuple(self._elements.shape)

    def reshape(self, shape: tuple[int, ...]) -> "Tensor":
        """Return the same elements in another shape."""
        return Tensor(self._elements.reshape(shape), self.dtype)

    def view(self, kind: dtype) -> "Tensor":
        """Return the same memory as elements of another type."""
        return Tensor(self._elements.view(kind.numpy_type), kind)

    def detach(self) -> Self:
        """Return the tensor."""
        return self

    def cpu(self) -> Self:
        """Return the tensor."""
        return self

    def contiguous(self) -> Self:
        """Return the tensor."""
        return self

    def numpy(self) -> Any:
        """Return the array; TypeError for bfloat16, which numpy does not have."""
        if self.dtype is bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._elements

    def __setitem__(self, index: int, value: float) -> None:
        self._elements[index] = value


def zeros(size: int, *, dtype: dtype) -> Tensor:
    """Return zeros."""
    return Tensor(np.zeros(size, dtype.numpy_type), dtype)


def frombuffer(buffer: Any, *, dtype: dtype, count: int = -1, offset: int = 0) -> Tensor:
    """Return a tensor over a buffer's memory; a read-only one is refused, where the real one warns."""
    if memoryview(buffer).readonly:
        raise ValueError("the buffer is not writable")
    return Tensor(np.frombuffer(buffer, dtype.numpy_type, count, offset), dtype)
