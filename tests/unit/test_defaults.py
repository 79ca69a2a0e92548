"""Defaults that stand twice, because import contracts keep both places apart, are equal."""

from inspect import signature

import pytest

from indexer.follow.follower import FollowerLimits
from indexer.native.index import NativeIndex
from kv_protocol.body_limits import BodyLimits
from kv_runtime.config.sections import BodyBoundsSection, IndexSection, Section


@pytest.mark.parametrize(
    ("section", "limits", "names"),
    [
        (BodyBoundsSection, BodyLimits, {"prompt_bytes_max", "options_bytes_max", "values_max"}),
        (IndexSection, FollowerLimits, {"gap_s", "behind_s", "answer_s"}),
        (IndexSection, NativeIndex, {"parked_blocks_max", "parked_ttl_s"}),
    ],
)
def test_a_section_has_the_defaults_of_what_it_configures(
    section: type[Section], limits: type[object], names: set[str]
) -> None:
    configured, taken = section.model_fields, signature(limits).parameters
    assert {name: configured[name].default for name in names} == {name: taken[name].default for name in names}
