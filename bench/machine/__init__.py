"""What this machine is and does: its environment, tools and clocks."""
