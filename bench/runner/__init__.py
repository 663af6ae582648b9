"""What runs in a candidate's process; it imports nothing else of the project."""
