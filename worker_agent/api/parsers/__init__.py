"""Tool calls and reasoning in the text of an answer: one incremental parser for each family of models; pure."""
