"""The sections of media: where nothing is named nothing is read or fetched, and what may not be is refused."""

import pytest
from pydantic import ValidationError

from worker_agent.media.config import EncodeSection, MediaSection, TransferSection
from worker_agent.media.parts import MediaRules
from worker_agent.media.urls import FetchRules


def test_by_default_nothing_is_fetched_and_no_file_is_read() -> None:
    section = MediaSection()
    assert section.rules == MediaRules()
    assert section.fetch_rules == FetchRules()
    assert section.directories == ()


def test_by_default_embeddings_stay_on_the_machine() -> None:
    section = TransferSection()
    assert (section.host, section.networks) == ("127.0.0.1", ("127.0.0.0/8", "::1/128"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("networks", ["10.0.0.1/8"]),
        ("networks", ["everywhere"]),
        ("directories", ["media"]),
        ("directories", ["/"]),
        ("directories", ["//"]),
        ("directories", ["/media/../etc"]),
        ("schemes", ["file"]),
        ("kinds", ["video"]),
        ("ports", [0]),
    ],
)
def test_a_section_that_may_not_be_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        MediaSection.model_validate({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", "0.0.0.0"),  # noqa: S104
        ("host", "::"),
        ("host", "gpu-1"),
        ("networks", ["x"]),
    ],
)
def test_a_transfer_that_may_not_be_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        TransferSection.model_validate({field: value})


@pytest.mark.parametrize(
    ("url", "kept"), [("", ""), ("http://10.0.0.1:8300", "http://10.0.0.1:8300"), ("https://e/", "https://e")]
)
def test_an_encode_worker_is_named_by_its_base(url: str, kept: str) -> None:
    assert EncodeSection(url=url).url == kept


@pytest.mark.parametrize(
    "url", ["e:8300", "ftp://e", "http://", "http://e/v1", "http://e?a=b", "http://u:p@e", "/media/e"]
)
def test_any_other_address_of_it_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match=r"allowed http\(s\)://host:port"):
        EncodeSection(url=url)
