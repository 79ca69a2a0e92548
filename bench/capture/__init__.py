"""Recordings of real engines, held against what the engines reused; a publisher that plays them."""
