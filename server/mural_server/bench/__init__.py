"""The code of ``mural bench``: every figure that is published is measured here."""
