"""Pure cost and memory models. No torch, no I/O."""
