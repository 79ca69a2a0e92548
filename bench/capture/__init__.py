"""Recordings of real engines, played through the whole pipe and held against what the engines reused."""
