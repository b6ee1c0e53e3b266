"""The proxy role: a FastAPI application around a pure scheduler. Holds nothing that the bucket does not."""
