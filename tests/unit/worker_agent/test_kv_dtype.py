"""The data type of an engine's KV cache, by its arguments and its checkpoint."""

from typing import Any

import pytest

from worker_agent.engines.trtllm.loading import kv_cache_dtype

BFLOAT16 = {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("requested", "model_dtype", "config", "quantization", "found"),
    [
        ("FP8", "auto", BFLOAT16, {}, "fp8"),
        ("auto", "auto", BFLOAT16, {}, "bfloat16"),
        (None, None, {"dtype": "float16"}, {}, "float16"),
        (None, "bfloat16", {"dtype": "float16"}, {}, "bfloat16"),
        (None, None, {"text_config": {"torch_dtype": "torch.bfloat16"}}, {}, "bfloat16"),
        ("auto", "bfloat16", BFLOAT16, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ("auto", None, BFLOAT16, {"quantization": {"kv_cache_quant_algo": None}}, "bfloat16"),
        ("auto", None, BFLOAT16 | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, {}, ""),
        ("auto", None, BFLOAT16 | {"quantization_config": {"quant_method": "mxfp4", "kv_cache_scheme": None}}, {},
         "bfloat16"),
        ("auto", "auto", {}, {}, ""),
    ],
)  # fmt: skip
def test_an_argument_decides_else_the_checkpoint(
    requested: str | None, model_dtype: str | None, config: dict[str, Any], quantization: dict[str, Any], found: str
) -> None:
    assert kv_cache_dtype(requested, model_dtype, config, quantization) == found
