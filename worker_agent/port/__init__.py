"""The interface of engines: their requests and answers, and the rules that a request to any engine must meet."""
