"""Sandboxing of processes: what they may access, and how they are ended."""
