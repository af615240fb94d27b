"""Keeps declared adapters resident: custom resources in, the servers' control API out."""
