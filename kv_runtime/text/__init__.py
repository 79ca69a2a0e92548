"""Text of models: chat templates, encoders, detokenizers. `loading` is the entry point."""
