"""`router bench request`: where the CPU time of one request goes."""
