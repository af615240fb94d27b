"""The parts that every model family is built from. Each calls the operators in `ops/` only."""
