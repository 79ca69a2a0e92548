"""`router bench decision`: how long it takes to place a request, by stage."""
