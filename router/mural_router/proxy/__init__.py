"""Carries a routed request's bytes to a replica and its answer back."""
