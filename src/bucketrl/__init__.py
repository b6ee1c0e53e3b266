"""Asynchronous GRPO on LoRA adapters for machines that share only a bucket."""

__version__ = "0.1.0"
