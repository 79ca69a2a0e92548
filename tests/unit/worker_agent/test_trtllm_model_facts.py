"""What is read of a model's files for its engine: how long a sequence may be, and the data type of the KV cache."""

from typing import Any

import pytest

from worker_agent.engines.trtllm.loading import engine_seq_len, kv_cache_dtype, model_seq_len
from worker_agent.port.types import EngineError

POSITIONS = {"max_position_embeddings": 1000}


def longest(asked: int | None, config: dict[str, Any], *, longer: bool = False) -> int:
    return engine_seq_len(asked, config, model="m", allows_longer=longer)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (POSITIONS, 1000),
        ({}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": 0}, None),
        ({"text_config": POSITIONS}, 1000),
        ({"llm_config": POSITIONS}, 1000),
        ({"text_config": 7, "language_config": POSITIONS}, 1000),
        ({"max_position_embeddings": 500, "text_config": POSITIONS}, 500),
        ({**POSITIONS, "rope_scaling": {"type": "linear", "factor": 2.5}}, 2500),
        ({**POSITIONS, "rope_scaling": {"rope_type": "dynamic", "factor": 1.0001}}, 1001),
        ({"text_config": {**POSITIONS, "rope_scaling": {"rope_type": "linear", "factor": 4}}}, 4000),
        ({**POSITIONS, "rope_scaling": None}, 1000),
        ({**POSITIONS, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 1000),
        ({**POSITIONS, "rope_scaling": {"type": "linear", "factor": "many"}}, 1000),
    ],
)
def test_the_model_s_positions_and_their_scaling(config: dict[str, Any], tokens: int | None) -> None:
    assert model_seq_len(config) == tokens


@pytest.mark.parametrize("kind", ["su", "longrope", "llama3", "yarn"])
def test_some_kinds_of_scaling_are_in_the_positions_already(kind: str) -> None:
    for key in ("type", "rope_type"):
        assert model_seq_len({**POSITIONS, "rope_scaling": {key: kind, "factor": 8.0}}) == 1000


def test_the_argument_makes_it_shorter_and_longer_only_where_that_is_allowed() -> None:
    assert longest(400, POSITIONS) == 400
    assert longest(4000, POSITIONS) == 1000
    assert longest(4000, POSITIONS, longer=True) == 4000
    assert longest(4000, {}) == 4000


@pytest.mark.parametrize(("config", "found"), [({}, "no config.json"), ({"a": 1}, "no max_position_embeddings")])
def test_an_unknown_length_is_one_sentence(config: dict[str, Any], found: str) -> None:
    with pytest.raises(EngineError) as raised:
        longest(None, config)
    assert str(raised.value) == (
        f"max_seq_len: found none, and {found} of model 'm', allowed one that has it, or the engine argument "
        "max_seq_len"
    )


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
