"""What a process may see and do, and who ends it."""
