"""Names of tenants, and that none of them tells a secret."""

import pytest

from router.queue.tenants import ANONYMOUS, NAME_CHARACTERS_MAX, SECRET_BYTES, TenantNames

SECRET = bytes(range(SECRET_BYTES))


def name(by: str, secret: bytes = SECRET, **headers: bytes) -> str:
    found = {key.replace("_", "-").encode(): value for key, value in headers.items()}
    return TenantNames(by, secret).name(found.get)


def test_without_fair_shares_all_are_one() -> None:
    assert name("none", authorization=b"Bearer sk-1", x_tenant_id=b"a") == ""


def test_a_key_names_its_tenant_and_is_not_in_the_name() -> None:
    found = name("api_key", authorization=b"Bearer sk-secret")
    assert found == name("api_key", authorization=b"Bearer sk-secret")
    assert found != name("api_key", authorization=b"Bearer sk-other")
    assert found != name("api_key", authorization=b"Bearer sk-secret", secret=bytes(SECRET_BYTES))
    assert found.startswith("key-")
    assert len(found) == len("key-") + 12
    assert "secret" not in found


def test_either_header_may_carry_the_key() -> None:
    assert name("api_key", x_api_key=b"sk-1").startswith("key-")
    assert name("api_key", x_api_key=b"sk-1", authorization=b"sk-2") == name("api_key", authorization=b"sk-2")


@pytest.mark.parametrize("by", ["api_key", "x-tenant-id"])
def test_a_request_without_a_tenant_is_anonymous(by: str) -> None:
    assert name(by) == name(by, x_tenant_id=b"  ") == ANONYMOUS


def test_a_headers_value_is_the_name() -> None:
    assert name("x-tenant-id", x_tenant_id=b" team-a ", authorization=b"Bearer sk-1") == "team-a"


@pytest.mark.parametrize("value", [b"x" * (NAME_CHARACTERS_MAX + 1), b"a\x07b", "\u00fc".encode()])
def test_a_value_that_is_no_name_stands_as_its_hash(value: bytes) -> None:
    found = name("x-tenant-id", x_tenant_id=value)
    assert found.startswith("value-")
    assert len(found) == len("value-") + 12
    assert name("x-tenant-id", x_tenant_id=b"y" * NAME_CHARACTERS_MAX) == "y" * NAME_CHARACTERS_MAX
