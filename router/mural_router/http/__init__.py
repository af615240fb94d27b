"""Strict HTTP/1.1 on both sides of the proxy: all that is ours in HTTP lies here."""
