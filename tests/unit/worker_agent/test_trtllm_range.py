"""Versions of TensorRT-LLM: their order, and the range that the agent supports."""

import tomllib

from tests.support.paths import ROOT
from worker_agent.engine_args.arguments import (
    CONTEXT_WITH_OVERLAP,
    SUPPORTED,
    is_before,
    is_supported,
    parse_version,
)

ORDERED = (
    "1.2.1", "1.3.0rc0", "1.3.0rc1", "1.3.0rc5", "1.3.0rc5.post1", "1.3.0rc12", "1.3.0rc29", "1.3.0", "1.3.1",
    "1.4.0rc1",
)  # fmt: skip
PYPROJECT = ROOT / "pyproject.toml"


def test_versions_are_ordered_as_they_were_released() -> None:
    versions = [parse_version(text) for text in ORDERED]
    assert None not in versions
    assert versions == sorted(versions, key=lambda version: version or ())


def test_the_range_is_the_1_3_and_the_1_4_line() -> None:
    for text in ("1.3.0rc0", "1.3.0rc23.post1", "1.3.0", "1.3.2+cu13", "1.4.0rc0", "1.4.0"):
        assert is_supported(text), text
    for text in ("1.2.1", "1.5.0rc0", "", "1.3.0.dev2026010100", "main", "1" * 5000):
        assert not is_supported(text), text


def test_the_extra_states_the_same_range() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["trtllm"]
    assert [each.partition(";")[0] for each in extras] == ["tensorrt-llm>=1.3.0rc0,<1.5"]
    assert SUPPORTED == "1.3.0rc0 or later, below 1.5"


def test_a_version_of_another_form_is_before_none() -> None:
    assert is_before("1.3.0rc0", CONTEXT_WITH_OVERLAP)
    assert not is_before("1.3.0rc1", CONTEXT_WITH_OVERLAP)
    assert not is_before("", CONTEXT_WITH_OVERLAP)
