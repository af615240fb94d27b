"""One address for a fleet of replicas: who asks, what for, and where it is at home."""
