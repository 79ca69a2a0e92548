"""Tensors that processes of a machine share: a handle becomes a tensor, once.

Source: `tensorrt_llm/_torch/shared_tensor/shared_tensor.py` (`SURFACE.md`).
"""

import hashlib
from importlib import import_module
from typing import Any, Self

import numpy as np

from .._fake.control import control  # noqa: TID252  by its own name mypy would look for the real package

torch: Any = import_module("torch")  # by its own name mypy would look for the real one
_KINDS = {"torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16, "torch.float64": torch.float64}


class SharedTensorContainer:
    """A handle; its tensor can be taken once, by the first caller."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told

    @classmethod
    def from_dict(cls, tensor_info: dict[str, Any]) -> Self:
        """Return the container of a handle; KeyError where it is none."""
        return cls({key: tensor_info[key] for key in ("method_key", "tensor_size", "storage_handle", "dtype")})

    def get_local_view(self) -> Any:
        """Return the tensor: numbers that its media determine."""
        control.take_tensor(self._told["storage_handle"])
        kind, size = _KINDS[self._told["dtype"]], tuple(self._told["tensor_size"])
        size_bytes = size[0] * size[1] * kind.numpy_type.itemsize
        made = hashlib.shake_128(self._told["storage_handle"].encode()).digest(size_bytes)
        return torch.Tensor(np.frombuffer(bytearray(made), kind.numpy_type).reshape(size), kind)
