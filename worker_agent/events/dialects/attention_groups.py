"""Which attention groups of a model count for prefixes.

    kind on the event      a main kind counts, every other one does not; a store with a group sets the group's kind
    none, group known      as the group's last kind
    none, group unknown    group 0, or no group: counts; any other does not

Main kinds hold every token of a prefix. Others (sliding windows, state spaces, cross attention, ...) hold parts, which
do not make a prefix reusable by themselves. Source: `docs/SOURCES.md` E3.3, cache groups.
"""

MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class AttentionGroups:
    """The kinds of one publisher's groups, from its stores. The caller bounds `group_idx`, and so the memory."""

    def __init__(self) -> None:
        self._is_main: dict[int, bool] = {}

    def on_stored(self, group_idx: int | None, kind: str | None) -> bool:
        """Learn from a store; return whether it counts."""
        if group_idx is not None and kind is not None:
            self._is_main[group_idx] = kind in MAIN_KINDS
        return self.counts(group_idx, kind)

    def counts(self, group_idx: int | None, kind: str | None) -> bool:
        """Return whether an event of this group counts, without learning from it."""
        if kind is not None:
            return kind in MAIN_KINDS
        return group_idx is None or self._is_main.get(group_idx, group_idx == 0)
