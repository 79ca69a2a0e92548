"""Configuration: `sections` that processes share, `loading` of a tree, `rendering` as text."""
