import msgspec
import pytest

from kv_protocol.errors import FOUND_CHARACTERS_MAX, UNDECODABLE, LimitExceeded, MalformedMessage


def test_a_malformed_message_says_where_and_why() -> None:
    error = MalformedMessage(17, "version 2, only 1 is known")
    assert (error.offset, error.reason) == (17, "version 2, only 1 is known")
    assert str(error) == "malformed at byte 17: version 2, only 1 is known"


@pytest.mark.parametrize(("found", "written"), [(-1, "-1"), ("a\nb", r"'a\nb'"), (None, "None"), ((), "()")])
def test_a_limit_says_which_field_what_was_found_and_what_is_allowed(found: object, written: str) -> None:
    error = LimitExceeded("seq", found, "1 or more")
    assert (error.field, error.found, error.allowed) == ("seq", found, "1 or more")
    assert str(error) == f"seq: found {written}, allowed 1 or more"


def test_what_is_long_is_cut() -> None:
    long = "x" * 1_000_000
    assert str(LimitExceeded("f", long, "less")) == f"f: found '{'x' * (FOUND_CHARACTERS_MAX - 1)}..., allowed less"
    assert len(str(MalformedMessage(0, long))) < 400


@pytest.mark.parametrize(
    "error",
    [
        msgspec.DecodeError(),
        msgspec.ValidationError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        RecursionError(),
        LimitExceeded("n", 1, "0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_each_error_of_decoding_foreign_bytes_is_foreseen(error: Exception) -> None:
    assert isinstance(error, UNDECODABLE)


@pytest.mark.parametrize("kind", [MemoryError, AssertionError, KeyError, TypeError, AttributeError])
def test_our_own_bugs_are_not_taken_for_a_peers(kind: type[Exception]) -> None:
    assert not issubclass(kind, UNDECODABLE)
