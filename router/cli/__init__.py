"""The commands of `router`; `serve` is what runs without a command, of the parts in `router_parts`."""
