"""The section of media: where nothing is named nothing is read or fetched, and what may not be is refused."""

import pytest
from pydantic import ValidationError

from worker_agent.media.config import MediaSection


def test_by_default_nothing_is_fetched_and_no_file_is_read() -> None:
    media = MediaSection()
    assert (media.schemes, media.directories) == ((), ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("networks", ["10.0.0.1/8"]),
        ("networks", ["10.0.0.0/33"]),
        ("networks", [True]),
        ("networks", [10]),
        ("directories", ["media"]),
        ("directories", ["/"]),
        ("directories", ["/media/../etc"]),
        ("ports", [0]),
    ],
)
def test_what_may_not_be_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        MediaSection.model_validate({field: value})
