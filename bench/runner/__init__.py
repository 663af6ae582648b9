"""Code that runs in a candidate's process. It imports nothing else of the project."""
