"""What an adapter is, who may use it, and where it comes from. Imports no other folder."""
