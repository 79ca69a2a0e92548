"""The fold of the log: a state machine for each rank's stream, and one fold of all streams into the index. Pure."""
