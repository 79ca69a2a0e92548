"""What the reuse of cached prompts saved, and for which models, tenants, LoRA adapters and prefixes."""
