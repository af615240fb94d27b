"""Model families, one file each, and the loading of their checkpoints."""
