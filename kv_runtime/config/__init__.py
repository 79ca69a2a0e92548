"""Configuration: `sections` that processes share, `options` of commands, `loading` of a tree, `rendering` as text."""
