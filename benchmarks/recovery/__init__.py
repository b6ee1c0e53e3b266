"""How long a killed role is missed, and what it costs in tokens; see `__main__.py`."""
