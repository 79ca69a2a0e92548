"""Which addresses media may be fetched from: public ones, and configured networks.

    address                                    checked as
    one that serves a cloud's metadata         itself: never allowed, whatever the configuration names
    ::ffff:a.b.c.d (IPv4-mapped)               a.b.c.d
    64:ff9b::a.b.c.d (NAT64)                   a.b.c.d
    in a network that is named                 allowed
    in a network of the tables below           refused for that network's reason
    IPv6 outside 2000::/3                      refused: reserved
    any other                                  allowed

The tables are ours, because `is_global` differs between Python versions. Addresses of tunnels (6to4, Teredo, NAT64 of
local prefixes) are refused, whatever address they contain.

Source: the IANA special-purpose address registries for IPv4 and IPv6 (RFC 6890 and its updates), RFC 6052 (NAT64), RFC
3056 (6to4), RFC 4380 (Teredo). Metadata: AWS "Instance metadata" (169.254.169.254, fd00:ec2::254), ECS task metadata
(169.254.170.2), EKS pod identity (169.254.170.23, fd00:ec2::23), Azure "IP address 168.63.129.16", Alibaba Cloud
(100.100.100.200), Oracle Cloud (192.0.0.192); Google, Azure and others use the first as well.
"""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from worker_agent.media.refusals import MediaReason

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

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
_REASON_OF_V4: tuple[tuple[str, MediaReason], ...] = (
    ("0.0.0.0/8", "address_unspecified"),
    ("10.0.0.0/8", "address_private"),
    ("100.64.0.0/10", "address_cgnat"),
    ("127.0.0.0/8", "address_loopback"),
    ("169.254.0.0/16", "address_link_local"),
    ("172.16.0.0/12", "address_private"),
    ("192.0.0.0/24", "address_reserved"),
    ("192.0.2.0/24", "address_reserved"),
    ("192.31.196.0/24", "address_reserved"),
    ("192.52.193.0/24", "address_reserved"),
    ("192.88.99.0/24", "address_reserved"),
    ("192.168.0.0/16", "address_private"),
    ("192.175.48.0/24", "address_reserved"),
    ("198.18.0.0/15", "address_reserved"),
    ("198.51.100.0/24", "address_reserved"),
    ("203.0.113.0/24", "address_reserved"),
    ("224.0.0.0/4", "address_multicast"),
    ("240.0.0.0/4", "address_reserved"),
)
_REASON_OF_V6: tuple[tuple[str, MediaReason], ...] = (
    ("::/128", "address_unspecified"),
    ("::1/128", "address_loopback"),
    ("2001::/23", "address_reserved"),
    ("2001:db8::/32", "address_reserved"),
    ("2002::/16", "address_reserved"),
    ("2620:4f:8000::/48", "address_reserved"),
    ("3fff::/20", "address_reserved"),
    ("fc00::/7", "address_private"),
    ("fe80::/10", "address_link_local"),
    ("fec0::/10", "address_private"),
    ("ff00::/8", "address_multicast"),
)
_TABLE: tuple[tuple[Network, MediaReason], ...] = tuple(
    (ip_network(text), reason) for text, reason in (*_REASON_OF_V4, *_REASON_OF_V6)
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_V4_MASK = 0xFFFF_FFFF


def parsed_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks that `texts` name (`10.0.0.0/8`, an address); raise ValueError for the first invalid one."""
    return tuple(ip_network(text) for text in texts)


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
    """Return why nothing may be fetched from `address`; None if it is allowed, as any address of `networks` is."""
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
