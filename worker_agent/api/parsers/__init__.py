"""Tool calls and reasoning in the text of an answer: one incremental, pure parser for each family of models."""
