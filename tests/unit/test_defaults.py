"""A default that stands twice, because import contracts keep both places apart, is equal."""

from kv_protocol.body_limits import BodyLimits
from kv_runtime.config.sections import BodyBoundsSection


def test_a_body_may_say_by_default_what_a_body_may_say_by_configuration() -> None:
    assert BodyBoundsSection().prompt_bytes_max == BodyLimits().prompt_bytes_max
