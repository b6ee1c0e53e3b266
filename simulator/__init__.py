"""Deterministic simulation: the real proxy, worker and learner code under virtual time and injected faults."""
