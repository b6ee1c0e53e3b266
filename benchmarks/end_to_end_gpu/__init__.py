"""Proxy, vLLM worker and learner on one GPU, an S3 server beside them: what a whole run achieves there."""
