"""The sections of media: where nothing is named nothing is read or fetched, and what may not be is refused."""

import pytest
from pydantic import BaseModel, ValidationError

from worker_agent.media.config import MediaSection, TransferSection


def test_by_default_nothing_is_fetched_and_no_file_is_read() -> None:
    section = MediaSection()
    assert (section.kinds, section.schemes, section.directories) == (("image",), (), ())


def test_by_default_nothing_is_transferred_between_machines() -> None:
    section = TransferSection()
    assert (section.host, section.networks) == ("127.0.0.1", ("127.0.0.0/8", "::1/128"))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (MediaSection, "networks", ["10.0.0.1/8"]),
        (MediaSection, "networks", ["10.0.0.0/33"]),
        (MediaSection, "directories", ["media"]),
        (MediaSection, "directories", ["/"]),
        (MediaSection, "directories", ["/media/../etc"]),
        (MediaSection, "ports", [0]),
        (TransferSection, "host", "0.0.0.0"),  # noqa: S104
        (TransferSection, "host", "::"),
        (TransferSection, "host", "gpu-1"),
        (TransferSection, "networks", ["x"]),
    ],
)
def test_what_may_not_be_is_refused(section: type[BaseModel], field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        section.model_validate({field: value})
