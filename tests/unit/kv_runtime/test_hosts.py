"""A server answers to its own names: what a browser sends for a page of another name is refused."""

import socket

import pytest
from pydantic import TypeAdapter, ValidationError

from kv_runtime.http.hosts import HostName, HostNames, WebOrigin, url_of

OWN = socket.gethostname().lower()


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3:80",
     "router.example:1", "Router.Example."],
)  # fmt: skip
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - that is what is tested
def test_its_own_names_are_served(host: str, bound: str) -> None:
    assert HostNames(bound, ("router.example",)).refusal(host) == ""


@pytest.mark.parametrize(
    "host", ["rebound.example", "127.0.0.1.rebound.example:8000", "localhost.rebound.example", "router.example.evil",
             "0x7f.1", "1.2.3"],
)  # fmt: skip
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_any_other_name_is_refused_with_the_setting_that_allows_it(host: str, bound: str) -> None:
    refusal = HostNames(bound, ("router.example",), setting="data.hosts").refusal(host)
    assert refusal == f"host: found {host!r}, allowed IP addresses, localhost and the names of data.hosts"


@pytest.mark.parametrize(
    "host", ["", "[::1", "[::1]x", "[]", "::1", ":8000", "127.0.0.1:19000@evil", "x@127.0.0.1", "localhost:80:80",
             "localhost:x", "localhost:123456", "localhost/a", "a b", " ", "localhost\n"],
)  # fmt: skip
@pytest.mark.parametrize("named", ["router.example", "*"])
def test_what_is_no_host_with_or_without_a_port_is_refused_always(host: str, named: str) -> None:
    assert HostNames("127.0.0.1", (named,)).refusal(host) == f"host: found {host!r}, allowed host or host:port"


def test_the_machines_name_is_served_beyond_loopback_alone() -> None:
    assert HostNames("0.0.0.0").refusal(f"{OWN}:8000") == ""  # noqa: S104
    assert HostNames("router.internal").refusal("router.internal:8000") == ""
    if OWN != "localhost":
        assert HostNames("127.0.0.1").refusal(OWN) != ""


def test_an_ipv6_address_is_in_brackets_in_a_url() -> None:
    assert [url_of("::1", 8003), url_of("::", 443, "https"), url_of("a.example", 80)] == [
        "http://[::1]:8003",
        "https://[::]:443",
        "http://a.example:80",
    ]


def test_a_star_allows_any_name() -> None:
    assert HostNames("127.0.0.1", ("*",)).refusal("anything.example") == ""


@pytest.mark.parametrize("name", ["", "http://router", "router:8000", "a b", "-a", "*.example"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed a host's name without scheme and port"):
        TypeAdapter(HostName).validate_python(name)


@pytest.mark.parametrize("origin", ["", "router.example", "http://", "https://a/b", "ftp://a", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match=r"allowed http\(s\)://host"):
        TypeAdapter(WebOrigin).validate_python(origin)


def test_names_and_origins_are_compared_in_lower_case() -> None:
    assert TypeAdapter(HostName).validate_python("Router.Example") == "router.example"
    assert TypeAdapter(WebOrigin).validate_python("HTTPS://App.Example:8443") == "https://app.example:8443"
