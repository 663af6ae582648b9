"""The judge judged: cheats with their honest twins, faults, mutations."""
