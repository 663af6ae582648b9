"""Ops: their contracts, and candidates that implement them."""
