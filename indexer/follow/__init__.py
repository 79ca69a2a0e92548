"""Following the log: the state machine of each rank's stream, and the fold of all of them into the index. Pure."""
