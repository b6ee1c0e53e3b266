"""The HTTP contract between the roles and the proxy: messages and a client. No role imports another."""
