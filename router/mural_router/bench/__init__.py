"""Placement replayed: traces, policies, a model of a fleet, and the figure that compares them."""
