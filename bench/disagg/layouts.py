"""How a number of simulated GPUs is divided into workers, one a GPU, and the words for it.

    8a              8 aggregated workers
    3p5d            3 that prefill, 5 that decode what was prefilled
    3p5d+POLICY     the same, and decode workers compute prompts themselves by this conditional policy
    3p5d@65536      the same, with a transfer buffer of so many tokens in every worker; without: never too small

Policy and buffer may stand together, in this order.
"""

import re
from typing import NamedTuple, get_args

from bench.routing.trace import TraceInvalid
from kv_protocol.fleet import Role
from router.decision.disaggregation import ConditionalPolicy

POLICIES: tuple[ConditionalPolicy, ...] = tuple(each for each in get_args(ConditionalPolicy) if each != "off")
_WORDS = re.compile(r"(?:([1-9]\d?)a|([1-9]\d?)p([1-9]\d?)d(?:\+([a-z_]+))?(?:@([1-9]\d{0,8}))?)")


class Layout(NamedTuple):
    """Workers by role; `conditional` and `buffer_tokens` are of those with prefill and decode workers."""

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    conditional: ConditionalPolicy = "off"
    buffer_tokens: int | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of every worker."""
        counts: tuple[tuple[Role, int], ...] = (
            ("aggregated", self.aggregated),
            ("prefill", self.prefill),
            ("decode", self.decode),
        )
        return tuple(role for role, workers in counts for _ in range(workers))

    @property
    def gpus(self) -> int:
        """How many workers there are."""
        return self.aggregated + self.prefill + self.decode

    @property
    def name(self) -> str:
        """The words for it."""
        if self.aggregated:
            return f"{self.aggregated}a"
        conditional = "" if self.conditional == "off" else f"+{self.conditional}"
        buffer = "" if self.buffer_tokens is None else f"@{self.buffer_tokens}"
        return f"{self.prefill}p{self.decode}d{conditional}{buffer}"


def layout_of(words: str) -> Layout:
    """Return the layout that the words name; raise `TraceInvalid`."""
    found = _WORDS.fullmatch(words)
    if found is None or found[4] not in (None, *POLICIES):
        allowed = f"8a, 3p5d, 3p5d+POLICY, 3p5d@TOKENS or 3p5d+POLICY@TOKENS; POLICY: {', '.join(POLICIES)}"
        raise TraceInvalid("layouts", "layout", words, allowed)
    aggregated, prefill, decode, conditional, buffer = found.groups()
    if aggregated is not None:
        return Layout(aggregated=int(aggregated))
    policy: ConditionalPolicy = next((each for each in POLICIES if each == conditional), "off")
    return Layout(0, int(prefill), int(decode), policy, None if buffer is None else int(buffer))


def layouts_of(words: str) -> tuple[Layout, ...]:
    """Return the layouts that are named between commas, each once, all of as many GPUs; raise `TraceInvalid`."""
    layouts = tuple(dict.fromkeys(layout_of(each) for each in words.split(",")))
    for each in layouts:
        if each.gpus != layouts[0].gpus:
            allowed = f"{layouts[0].gpus}, as {layouts[0].name} has"
            raise TraceInvalid("layouts", "GPUs", f"{each.gpus} of {each.name}", allowed)
    return layouts
