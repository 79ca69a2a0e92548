"""The interface of engines: what one is asked, what it answers, and what a request to any engine has to meet."""
