"""Shadow policies: what other policies would choose for the requests that this router serves, without effect."""
