"""The command line, the local launcher and one start script per role."""
