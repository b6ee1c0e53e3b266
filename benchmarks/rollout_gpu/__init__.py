"""A rollout worker against vLLM alone, and what a new policy version costs it."""
