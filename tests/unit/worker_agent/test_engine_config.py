"""The engine's section: what fits together, and what is refused with its field."""

import pytest

from kv_runtime.config.loading import ConfigurationError, load_settings
from worker_agent.config import AgentSettings, EngineSection


def loaded(*assignments: str) -> EngineSection:
    return load_settings(AgentSettings, assignments=[f"engine.{each}" for each in assignments]).engine


def test_there_is_one_window_and_no_host_tier_by_default() -> None:
    engine = loaded()
    assert (engine.host_blocks, engine.narrow_windows) == (0, ())


def test_the_windows_narrower_than_the_widest_are_given_in_order() -> None:
    engine = loaded("max_seq_len=4096", "window_sizes=[4096,512,128]")
    assert engine.narrow_windows == (128, 512)


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        (["window_sizes=[512]"], "window_sizes: the widest is 512, not max_seq_len, 65536"),
        (["window_sizes=[512,512,65536]"], "each allowed once"),
        (["window_sizes=[0,65536]"], "engine.window_sizes"),
        (["host_blocks=-1"], "engine.host_blocks"),
    ],
)
def test_what_does_not_fit_together_is_named(assignments: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        loaded(*assignments)
    assert problem in str(error.value)


def test_all_problems_are_named_together() -> None:
    with pytest.raises(ConfigurationError) as error:
        loaded("window_sizes=[512,512]")
    assert "each allowed once" in str(error.value)
    assert "the widest is 512" in str(error.value)
