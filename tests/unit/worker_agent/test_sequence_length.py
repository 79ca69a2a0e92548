"""How long a sequence may be, by a model's `config.json` and the engine's argument."""

from typing import Any

import pytest

from worker_agent.engines.trtllm.sequence_length import SequenceLengthUnknown, engine_seq_len, model_seq_len

POSITIONS = {"max_position_embeddings": 1000}


def longest(asked: int | None, config: dict[str, Any], *, longer: bool = False) -> int:
    return engine_seq_len(asked, config, model="m", allows_longer=longer)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (POSITIONS, 1000),
        ({}, None),
        ({"max_position_embeddings": None}, None),
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
    with pytest.raises(SequenceLengthUnknown) as raised:
        longest(None, config)
    assert str(raised.value) == (
        f"max_seq_len: found none, and {found} of model 'm', allowed one that has it, or the engine argument "
        "max_seq_len"
    )
