"""Operators in C++ (server/native), called through a plain C ABI."""
