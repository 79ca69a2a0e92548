"""The index and the state machine of each stream that feeds it, pure."""
