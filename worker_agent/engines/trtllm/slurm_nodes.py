"""Expands Slurm's short form of host lists, `SLURM_STEP_NODELIST`.

    list    = group {"," group}                      a,b             a b
    group   = (text | "[" numbers "]"), repeated     n[1-3,7]        n1 n2 n3 n7
    numbers = number | first "-" last {"," ...}      n[08-11]        n08 n09 n10 n11     padded as `first` is
    several brackets: the last varies fastest        r[1-2]n[1-2]    r1n1 r1n2 r2n1 r2n2

The hosts have the order of the list, in which Slurm numbers a step's nodes; a host that is twice in the list is twice
in the result. `text` has letters, digits, `.`, `_` and `-`. Why no library expands it: ADR 24.

Source: Slurm's `sbatch`, `scontrol show hostnames`; the grammar of RFC 29 of the Flux framework
(https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_29.html).
"""

import re
from itertools import product

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import DP_RANK_MAX

HOSTS_MAX = DP_RANK_MAX + 1
"""A worker may have as many ranks."""
_CHARACTERS_MAX = 65_536
_DIGITS_MAX = 9
_ALLOWED = "hosts as Slurm writes them: node[01-04,7],login"
_GROUP = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([A-Za-z0-9._-]+)")
_RANGE = re.compile(rf"([0-9]{{1,{_DIGITS_MAX}}})(?:-([0-9]{{1,{_DIGITS_MAX}}}))?")


def expanded(nodelist: str) -> tuple[str, ...]:
    """Return the hosts of a list in their order; () for an empty one.

    Raises:
        LimitExceeded: the list has another form, or more than `HOSTS_MAX` hosts.
    """
    if not nodelist:
        return ()
    if len(nodelist) > _CHARACTERS_MAX:
        raise LimitExceeded("SLURM_STEP_NODELIST", f"{len(nodelist)} characters", f"at most {_CHARACTERS_MAX}")
    hosts: list[str] = []
    for group in _groups(nodelist):
        hosts += _hosts(group, nodelist, HOSTS_MAX - len(hosts))
    return tuple(hosts)


def _groups(nodelist: str) -> list[str]:
    """Split the list at the commas outside brackets."""
    groups, at = [], 0
    while True:
        found = _GROUP.match(nodelist, at)
        if found is None:
            raise _unreadable(nodelist)
        groups.append(found[0])
        at = found.end()
        if at == len(nodelist):
            return groups
        if nodelist[at] != ",":
            raise _unreadable(nodelist)
        at += 1


def _hosts(group: str, nodelist: str, hosts_max: int) -> list[str]:
    parts: list[list[str]] = []
    count = 1
    for part in _PART.finditer(group):
        spelled = _numbers(part[1], nodelist, hosts_max) if part[1] else [part[2]]
        count *= len(spelled)
        if count > hosts_max:
            raise _too_many(nodelist)
        parts.append(spelled)
    return ["".join(chosen) for chosen in product(*parts)]


def _numbers(numbers: str, nodelist: str, hosts_max: int) -> list[str]:
    spelled: list[str] = []
    for each in numbers.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            raise _unreadable(nodelist)
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise _unreadable(nodelist)
        if len(spelled) + last - first >= hosts_max:
            raise _too_many(nodelist)
        spelled += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return spelled


def _unreadable(nodelist: str) -> LimitExceeded:
    return LimitExceeded("SLURM_STEP_NODELIST", nodelist[:80], _ALLOWED)


def _too_many(nodelist: str) -> LimitExceeded:
    return LimitExceeded("SLURM_STEP_NODELIST", nodelist[:80], f"at most {HOSTS_MAX} hosts")
