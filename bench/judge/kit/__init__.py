"""What runs inside the runner's process: copied beside it, so that nothing of the project is."""
