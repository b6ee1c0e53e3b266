"""A run under random signals and store faults; see `__main__.py`."""
