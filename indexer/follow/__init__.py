"""The fold of the log: a state machine for each rank's stream, and all of them together into the index. Pure."""
