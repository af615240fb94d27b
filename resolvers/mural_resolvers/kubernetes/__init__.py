"""Mural on Kubernetes: its custom resources as plain data, and a small client that watches them.

Needs the extra ``kubernetes``; `objects` alone needs nothing.
"""
