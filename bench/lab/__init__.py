"""How the tables of `bench/results` are made. No part of the product: it is in no wheel."""
