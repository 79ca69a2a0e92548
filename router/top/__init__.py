"""`router top`: a running fleet in a terminal."""
