"""Checks URLs of media, which are then used as they were checked: no other parser reads them again.

    data:<type>;base64,<base64>           bytes; their number is bounded before they are decoded
    file:///<path>, /<path>               an absolute path without `..` and control characters; the host of `file:` is
                                          empty or `localhost`, and its percent-encoding is decoded once
    http(s)://<host>[:<port>]/<path>      a target of ASCII characters with an allowed scheme and port, no credentials

A host of digits and dots must be an IPv4 address as four decimal numbers: old spellings (`2130706433`, `0177.1`) are
refused. Any other host is judged by its addresses.

Media may be fetched from public addresses and configured networks:

    address                                    checked as
    one that serves a cloud's metadata         itself: never allowed, whatever the configuration names
    ::ffff:a.b.c.d (IPv4-mapped)               a.b.c.d
    64:ff9b::a.b.c.d (NAT64)                   a.b.c.d
    in a configured network                    allowed
    in a network of the table below            refused for that network's reason
    IPv6 outside 2000::/3                      refused: reserved
    any other                                  allowed

The table is ours, because `is_global` differs between Python versions. Addresses of tunnels (6to4, Teredo, NAT64 of
local prefixes) are refused, whatever address they contain.

Source: RFC 2397 (data), RFC 8089 (file), RFC 3986.
Addresses: the IANA special-purpose address registries for IPv4 and IPv6 (RFC 6890 and its updates), RFC 6052 (NAT64),
RFC 3056 (6to4), RFC 4380 (Teredo). Metadata: AWS "Instance metadata" (169.254.169.254, fd00:ec2::254), ECS task
metadata (169.254.170.2), EKS pod identity (169.254.170.23, fd00:ec2::23), Azure "IP address 168.63.129.16", Alibaba
Cloud (100.100.100.200), Oracle Cloud (192.0.0.192); Google, Azure and others use AWS's first as well.
"""

import binascii
import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import unquote, urljoin

from yarl import URL

from worker_agent.media.config import MediaSection
from worker_agent.media.refusals import MediaReason, MediaRefused, shown_url

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

URL_CHARACTERS_MAX = 8192
"""How many characters a fetched URL or a path may have; for a `data:` URL the number of bytes is bounded instead."""
_SAFE = re.compile(r"[\x21-\x7e]+")
_BACKSLASH = "\\"
"""Browsers read it as a slash, so it is refused."""
_SLICE_CHARACTERS = 1 << 20
"""Base64 characters decoded at once: a multiple of 4."""
_DATA = re.compile(r"data:(?P<type>[a-z0-9.+-]+/[a-z0-9.+-]+);base64", re.IGNORECASE)
_DATA_HEAD_CHARACTERS_MAX = 128


def scheme_of(url: str) -> str:
    """Return the scheme in lower case; empty without one."""
    scheme, separator, _ = url.partition(":")
    return scheme.lower() if separator and "/" not in scheme else ""


def http_target(url: str, field: str, rules: MediaSection) -> URL:
    """Return `url` without its fragment, if it is allowed; raise `MediaRefused`. Its host is not resolved yet."""
    if len(url) > URL_CHARACTERS_MAX:
        raise MediaRefused("url_form", field, f"{len(url)} characters", f"at most {URL_CHARACTERS_MAX}")
    if not _is_plain(url):
        raise _refused("url_form", field, url, "printable ASCII without spaces and backslashes")
    if scheme_of(url) not in rules.schemes:
        raise _refused("url_scheme", field, url, _one_of("a URL with the scheme", (*rules.schemes, "data")))
    try:
        target = URL(url, encoded=True).with_fragment(None)
        host, port = target.raw_host or "", target.port
        if ":" in host or host.replace(".", "").isdigit():  # aiohttp takes it for an address, and resolves it itself
            ip_address(host)
    except ValueError as error:
        raise _refused("url_form", field, url, "a URL (RFC 3986)") from error
    if not host or "%" in host:
        raise _refused("url_form", field, url, "a URL with a host, as a name or an address")
    if "@" in target.raw_authority:
        raise _refused("url_credentials", field, url, "a URL without a user name or password")
    if port not in rules.ports:
        raise _refused("url_port", field, url, _one_of("the port", tuple(map(str, rules.ports))))
    return target


def redirected(base: URL, location: str | None, field: str, rules: MediaSection) -> URL:
    """Return the URL that `base` redirects to, checked like a client's URL; raise `MediaRefused`."""
    if not location or len(location) > URL_CHARACTERS_MAX or not _is_plain(location):
        raise MediaRefused("redirect_form", field, "a Location that is no URL", "a URL of printable ASCII")
    try:
        target = http_target(urljoin(str(base), location), field, rules)
    except ValueError as error:
        raise MediaRefused("redirect_form", field, "a Location that is no URL", "a URL (RFC 3986)") from error
    if base.scheme == "https" and target.scheme != "https":
        raise _refused("redirect_form", field, str(target), "https: the URL that redirects has it")
    return target


def checked_addresses(
    addresses: Sequence[Address], target: URL, field: str, rules: MediaSection
) -> tuple[Address, ...]:
    """Return the addresses of the target's host if there are any and all are allowed; else raise `MediaRefused`.

    One forbidden address is enough for a refusal: the owner of the name chooses its addresses.
    """
    for address in addresses:
        if reason := address_refusal(address, rules.networks):
            shown = f"{shown_url(str(target))} at {address}"
            raise MediaRefused(reason, field, shown, "addresses of the public internet, and of media.networks")
    if not addresses:
        raise _refused("address_unresolved", field, str(target), "a host that has an address")
    return tuple(addresses)


def file_path(url: str, field: str) -> str:
    """Return the absolute path that `url` (`file:` or a path) names; raise `MediaRefused`. Links are not resolved."""
    if len(url) > URL_CHARACTERS_MAX:
        raise MediaRefused("path_form", field, f"{len(url)} characters", f"at most {URL_CHARACTERS_MAX}")
    path = url
    if scheme_of(url) == "file":
        host, slash, rest = url[len("file:") :].removeprefix("//").partition("/")
        if host.lower() not in ("", "localhost") or "?" in url or "#" in url:
            raise _refused("path_form", field, url, "file:///path without host, query and fragment")
        try:
            path = slash + unquote(rest, errors="strict")
        except UnicodeDecodeError as error:
            raise _refused("path_form", field, url, "a path in UTF-8") from error
    if not path.startswith("/") or path.startswith("//") or not path.isprintable() or _BACKSLASH in path:
        raise _refused("path_form", field, url, "an absolute path of printable characters")
    if ".." in path.split("/"):
        raise _refused("path_form", field, url, "a path without `..`")
    return path


def decoded_data(url: str, field: str, bytes_max: int, cut: memoryview | None = None) -> tuple[str, bytes]:
    """Return the media type, in lower case, and the bytes of a `data:` URL; raise `MediaRefused`.

    `cut` is the base64 if it was taken out of the URL before.
    """
    comma = url.find(",", 0, _DATA_HEAD_CHARACTERS_MAX)
    head = _DATA.fullmatch(url, 0, comma) if comma > 0 else None
    if head is None:
        raise _refused("data_form", field, url, "data:<type>/<subtype>;base64,<data>")
    encoded = url[comma + 1 :] if cut is None else cut
    if len(encoded) > 4 * -(-bytes_max // 3):
        raise MediaRefused("too_large", field, f"{len(encoded)} base64 characters", f"at most {bytes_max} bytes")
    try:
        data = _decoded(encoded)
    except ValueError as error:
        raise _refused("data_form", field, url, "base64 (RFC 4648) with its padding") from error
    if not 0 < len(data) <= bytes_max:
        raise MediaRefused("too_large" if data else "data_form", field, f"{len(data)} bytes", f"1..{bytes_max} bytes")
    return head["type"].lower(), data


def _decoded(encoded: str | memoryview) -> bytes:
    """Return the bytes of base64. Decoding keeps the GIL, so it is done in slices that hold up the event loop less."""
    slices = [encoded[at : at + _SLICE_CHARACTERS] for at in range(0, len(encoded), _SLICE_CHARACTERS)]
    parts = [binascii.a2b_base64(each, strict_mode=True) for each in slices]
    if any(len(part) < _SLICE_CHARACTERS // 4 * 3 for part in parts[:-1]):
        raise ValueError("padding before the end")
    return b"".join(parts)


def _is_plain(url: str) -> bool:
    return _SAFE.fullmatch(url) is not None and _BACKSLASH not in url


def _one_of(what: str, allowed: tuple[str, ...]) -> str:
    return f"{what} {' or '.join(allowed)}" if allowed else "none"


def _refused(reason: MediaReason, field: str, url: str, allowed: str) -> MediaRefused:
    return MediaRefused(reason, field, shown_url(url), allowed)


# ---------------------------------------------------------------- addresses
_METADATA = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
    )
)
_NETWORKS: Mapping[MediaReason, tuple[str, ...]] = {
    "address_unspecified": ("0.0.0.0/8", "::/128"),
    "address_loopback": ("127.0.0.0/8", "::1/128"),
    "address_private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
    "address_cgnat": ("100.64.0.0/10",),
    "address_link_local": ("169.254.0.0/16", "fe80::/10"),
    "address_multicast": ("224.0.0.0/4", "ff00::/8"),
    "address_reserved": (
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24"),
        *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    ),
}
_TABLE: tuple[tuple[Network, MediaReason], ...] = tuple(
    (ip_network(text), reason) for reason, texts in _NETWORKS.items() for text in texts
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_V4_MASK = 0xFFFF_FFFF


def real_address(address: Address) -> Address:
    """Return the address that is reached: the IPv4 address in a mapped or NAT64 one, else the same without a zone."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if IPv6Address(int(address)) in _NAT64:
        return IPv4Address(int(address) & _V4_MASK)
    return IPv6Address(int(address))


def address_refusal(address: Address, networks: Sequence[Network] = ()) -> MediaReason | None:
    """Return why nothing may be fetched from `address`; None if it is allowed, as all of `networks` but metadata is."""
    real = real_address(address)
    if real in _METADATA:
        return "address_metadata"
    if any(real in network for network in networks):
        return None
    for network, reason in _TABLE:
        if real in network:
            return reason
    if isinstance(real, IPv6Address) and real not in _GLOBAL_UNICAST:
        return "address_reserved"
    return None
