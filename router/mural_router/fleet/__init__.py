"""Which replicas there are and how they are: found, followed, and aged."""
