"""The sections of media: where nothing is named nothing is read or fetched, and what may not be is refused."""

import pytest
from pydantic import BaseModel, ValidationError

from worker_agent.media.config import MediaSection, TransferSection


def test_by_default_nothing_is_fetched_no_file_is_read_and_transfers_stay_on_the_machine() -> None:
    media, transfer = MediaSection(), TransferSection()
    assert (media.schemes, media.directories) == ((), ())
    assert (transfer.host, transfer.networks) == ("127.0.0.1", ("127.0.0.0/8", "::1/128"))


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
