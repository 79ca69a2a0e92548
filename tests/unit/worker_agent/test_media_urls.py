"""URLs, addresses, data and paths: what two readers could understand differently is refused, and what is not public."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from aiohttp.helpers import is_ip_address
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_agent.media_samples import PNG, data_url, reason_of, refused
from worker_agent.media.config import MediaSection
from worker_agent.media.refusals import MediaRefused
from worker_agent.media.urls import (
    URL_CHARACTERS_MAX,
    address_refusal,
    checked_addresses,
    decoded_data,
    file_path,
    http_target,
    redirected,
)

RULES = MediaSection(schemes=("https", "http"), ports=(80, 443, 8080))
FIELD = "url"


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("https://Example.org", ("https", "Example.org", 443, "/")),
        ("HTTP://example.org:8080/a%2e%2e/b?c=d&e#f", ("http", "example.org", 8080, "/a%2e%2e/b?c=d&e")),
        ("http://[2606:4700::1]:80/", ("http", "2606:4700::1", 80, "/")),
        ("http://93.184.215.14/", ("http", "93.184.215.14", 80, "/")),
        ("http://localhost./", ("http", "localhost.", 80, "/")),
        ("http://a_b.example.org/?", ("http", "a_b.example.org", 80, "/")),
        ("http://[::1]:80/a%2Fb?c=%2F&d", ("http", "::1", 80, "/a%2Fb?c=%2F&d")),
        ("https://1.2.3.4:443/%zz?<>", ("https", "1.2.3.4", 443, "/%zz?<>")),
    ],
)
def test_a_target_is_all_of_a_url_but_the_fragment(url: str, read: tuple[str, str, int, str]) -> None:
    target = http_target(url, FIELD, RULES)
    assert (target.scheme, target.raw_host, target.port, target.raw_path_qs) == read


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://me@h/", "url_credentials"),
        ("http://public.example#@127.0.0.1/", None),
        ("http://public.example@127.0.0.1/", "url_credentials"),
        ("http://a:80\\@b/", "url_form"),
        ("http://a b/", "url_form"),
        ("http://a\r\nHost: b/", "url_form"),
        ("http://①②⑦.0.0.1/", "url_form"),
        ("http://a/ü", "url_form"),
        ("http://h:22/", "url_port"),
        ("http://a:80:80/", "url_form"),
        ("ftp://h/", "url_scheme"),
        ("h/a.png", "url_scheme"),
        ("http:h", "url_form"),
        ("http:///a", "url_form"),
        *(
            (f"http://{host}/", "url_form")
            for host in ("2130706433", "127.0.0.1.", "127.0.0.08", "256.1.1.1", "0177.1")
        ),
        *(
            (f"http://{host}/", "url_form")
            for host in ("[::1%25eth0]", "[fe80::1%eth0]", "[127.0.0.1]", "[::1", "a%00.b")
        ),
        ("http://h/" + "a" * URL_CHARACTERS_MAX, "url_form"),
    ],
)
def test_another_url_is_refused(url: str, reason: str | None) -> None:
    if reason is None:  # the fragment is none of the host
        assert "@" not in str(http_target(url, FIELD, RULES))
    else:
        assert reason_of(http_target, url, FIELD, RULES) == reason


def test_nothing_is_fetched_unless_a_scheme_is_allowed() -> None:
    for url, rules in (("https://h/", MediaSection()), ("http://h/", MediaSection(schemes=("https",)))):
        assert reason_of(http_target, url, FIELD, rules) == "url_scheme"


def test_a_refusal_shows_no_secret() -> None:
    for url in ("http://me:secret@h/", "ftp://h/?secret", "http://h:22/?secret#secret"):
        with pytest.raises(MediaRefused) as caught:
            http_target(url, FIELD, RULES)
        assert "secret" not in str(caught.value)


@given(st.text(max_size=60))
def test_whatever_is_asked_is_read_or_refused(text: str) -> None:
    for url in (text, f"http://{text}", f"http://h/{text}", f"http://h{text}/"):
        try:
            target = http_target(url, FIELD, RULES)
        except MediaRefused:
            continue
        assert target.raw_host
        if is_ip_address(target.raw_host):  # of which aiohttp asks no resolver
            ip_address(target.raw_host)
        assert str(target).isascii()
        assert http_target(str(target), FIELD, RULES) == target


ADDRESSES: dict[str | None, tuple[str, ...]] = {
    "address_unspecified": ("0.0.0.0", "0.1.2.3", "::"),  # noqa: S104
    "address_loopback": ("127.0.0.1", "127.255.255.254", "::1"),
    "address_private": ("10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.1", "fec0::1", "fc00::1"),
    "address_cgnat": ("100.64.0.1", "100.127.255.255"),
    "address_link_local": ("169.254.1.1", "fe80::1"),
    "address_multicast": ("224.0.0.1", "ff02::1"),
    "address_reserved": (
        *("255.255.255.255", "198.18.0.1", "192.0.2.1", "::127.0.0.1", "64:ff9b:1::a00:1", "2002:7f00:1::"),
        *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "100::1", "4000::1"),
    ),
    "address_metadata": (
        *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("fd00:ec2::254", "::ffff:169.254.169.254"),
    ),
    None: (
        *("93.184.215.14", "100.63.255.255", "172.32.0.1", "2606:4700::1111", "64:ff9b::5db8:d70e"),
        "::ffff:93.184.215.14",
    ),
}


def test_only_public_addresses_may_be_asked() -> None:
    for reason, addresses in ADDRESSES.items():
        for address in addresses:
            assert address_refusal(ip_address(address)) == reason, address


@given(st.ip_addresses(v=4))
def test_what_python_calls_private_is_never_public_here(address: IPv4Address) -> None:
    if address.is_private or address.is_multicast or address.is_reserved:
        assert address_refusal(address) is not None


@given(st.ip_addresses(v=6))
def test_nor_in_ipv6_unless_it_leads_to_ipv4(address: IPv6Address) -> None:
    if address.is_private or address.is_multicast or address.is_link_local:
        assert address_refusal(address) is not None or address.ipv4_mapped is not None


@given(st.ip_addresses(v=4))
def test_the_disguises_of_an_address_are_judged_as_it_is(address: IPv4Address) -> None:
    for prefix in (0xFFFF << 32, 0x64_FF9B << 96):
        assert address_refusal(IPv6Address(prefix | int(address))) == address_refusal(address)


def test_a_network_that_is_named_may_be_asked_but_never_for_metadata() -> None:
    networks = [*map(ip_network, ("127.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "fd00::/8"))]
    assert address_refusal(ip_address("127.0.0.1"), networks) is None
    assert address_refusal(ip_address("::ffff:127.0.0.1"), networks) is None
    assert address_refusal(ip_address("10.0.0.1"), networks) == "address_private"
    for metadata in ("169.254.169.254", "100.100.100.200", "fd00:ec2::254", "::ffff:169.254.169.254"):
        assert address_refusal(ip_address(metadata), networks) == "address_metadata"


def test_one_address_that_may_not_be_asked_refuses_the_name() -> None:
    target = http_target("http://h/?secret", FIELD, RULES)
    public, private = ip_address("93.184.215.14"), ip_address("10.0.0.1")
    assert checked_addresses([public], target, FIELD, RULES) == (public,)
    for addresses in ([public, private], [private, public]):
        with pytest.raises(MediaRefused, match=r"http://h/ at 10\.0\.0\.1") as caught:
            checked_addresses(addresses, target, FIELD, RULES)
        assert refused(caught) == "address_private"
    assert reason_of(checked_addresses, [], target, FIELD, RULES) == "address_unresolved"


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("/b", "https://h/b"),
        ("b?c", "https://h/x/b?c"),
        ("//other.example/b", "https://other.example/b"),
        ("https://other.example/b", "https://other.example/b"),
        ("http://other.example/b", "redirect_form"),
        ("file:///etc/passwd", "url_scheme"),
        ("https://me@other.example/", "url_credentials"),
        ("https://[::1/", "redirect_form"),
        ("/ä", "redirect_form"),
        (None, "redirect_form"),
        ("/" + "a" * URL_CHARACTERS_MAX, "redirect_form"),
    ],
)
def test_a_redirect_is_checked_as_a_url_is(location: str | None, found: str) -> None:
    base = http_target("https://h/x/y", FIELD, RULES)
    if found.startswith("https:"):
        assert str(redirected(base, location, FIELD, RULES)) == found
    else:
        assert reason_of(redirected, base, location, FIELD, RULES) == found


def test_data_are_decoded() -> None:
    assert decoded_data(data_url(PNG), FIELD, len(PNG)) == ("image/png", PNG)
    assert decoded_data("DATA:Image/PNG;BASE64,AAAA", FIELD, 3) == ("image/png", bytes(3))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png,a", "data_form"),
        ("data:image/png;base64", "data_form"),
        ("data:image/png;charset=x;base64,AAAA", "data_form"),
        ("data:image/png;base64,AAA", "data_form"),
        ("data:image/png;base64,AA A", "data_form"),
        ("data:image/png;base64,ÄAAA", "data_form"),
        ("data:image/png;base64,", "data_form"),
        ("data:" + "a" * 200 + "/png;base64,AAAA", "data_form"),
        ("data:image/png;base64,AAAAAAAAAAAA", "too_large"),
        ("data:image/png;base64," + "!" * 100, "too_large"),  # that it is no base64 is never looked at
        ("data:image/png;base64,AAAAAAAAAAA=", "too_large"),
    ],
)
def test_other_data_are_refused(url: str, reason: str) -> None:
    assert reason_of(decoded_data, url, FIELD, 7) == reason


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/d/a.png", "/d/a.png"),
        ("/d/a%2e.png", "/d/a%2e.png"),
        ("file:///d/a.png", "/d/a.png"),
        ("FILE://localhost/d/a%20b.png", "/d/a b.png"),
        ("file:/d/a.png", "/d/a.png"),
        ("file:///d/a%252fb", "/d/a%2fb"),
    ],
)
def test_a_path_is_decoded_once_and_only_of_a_url(url: str, path: str) -> None:
    assert file_path(url, FIELD) == path


@pytest.mark.parametrize(
    "url",
    [
        "/d/../etc/passwd", "/d/..", "file:///d/%2e%2e/a", "file:///d/..%2fa", "file:///d/a%00.png", "/d/a\0.png",
        "file:///d/%ff", "file://host/d/a.png", "file:d/a", "file:///d?x", "//host/d", "file:////host/d",
        "file:///d%5c..%5ca", "/" + "a" * URL_CHARACTERS_MAX,
    ],
)  # fmt: skip
def test_another_path_is_refused(url: str) -> None:
    assert reason_of(file_path, url, FIELD) == "path_form"
