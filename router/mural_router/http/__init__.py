"""Strict HTTP/1.1 on both sides of the proxy: all that is ours in HTTP lies here.

`head` and `chunks` say what a message is, `client` and `upstream` are the two sides, `watch` keeps
their deadlines. Nothing here knows what is asked or who asks.
"""
