"""`router bench bodies`: what large or odd request bodies cost a router and a worker."""
