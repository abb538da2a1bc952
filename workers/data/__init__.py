"""Training files: JSONL in OpenAI's reinforcement fine-tuning row shape, and two built-in ones."""
