"""`router bench trace` and `hot-spots`: routing quality in virtual time, and the virtual fleet."""
