"""splitmix64: the one mixing function for digests and for every seeded choice.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

U64_MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN_GAMMA = 0x9E37_79B9_7F4A_7C15


def mix64(value: int) -> int:
    """Return the finalised 64-bit mix of `value`; a bijection on u64."""
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & U64_MASK
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & U64_MASK
    return value ^ (value >> 31)


def splitmix64(value: int) -> int:
    """Return the first output of a splitmix64 generator whose state is `value` (u64)."""
    return mix64((value + GOLDEN_GAMMA) & U64_MASK)


def unit_interval(seed: int, draw: int = 0) -> float:
    """Return the seed's `draw`-th number in [0, 1), the same on every machine: the top 53 bits of the output."""
    return (mix64((seed + (draw + 1) * GOLDEN_GAMMA) & U64_MASK) >> 11) * 2.0**-53


def choice_index(seed: int, count: int, draw: int = 0) -> int:
    """Return an index in [0, count), uniform to within 2**-53, the same on every machine."""
    assert count > 0
    return int(unit_interval(seed, draw) * count)
