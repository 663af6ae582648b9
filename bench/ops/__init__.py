"""What can be replaced: contracts of ops, and the sources that claim to meet them."""
