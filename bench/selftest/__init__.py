"""Self-test of the judge: cheats with their honest twins, faults and mutations."""
