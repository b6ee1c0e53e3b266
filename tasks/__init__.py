"""Prompts and rewards: prompt streams with a stable index, answer rules and verifiers."""
