"""Rank a profile: python rank_profile.py decode.nsys-rep (or .sqlite, a csv, a torch trace)."""

import sys
from pathlib import Path

import patcher

SAMPLE = Path(__file__).parents[1] / "tests/data/nsys/decode.sqlite"

p = patcher.profile(sys.argv[1] if len(sys.argv) > 1 else SAMPLE, model="gpt-oss-20b")
for warning in p.warnings:
    print(f"{warning.kind}: {warning.message}")

print(p)

# where does an op of the kernel library cover a hotspot?
frame = p.to_pandas()
covered = frame.dropna(subset="op").groupby("op")["share_pct"].sum()
print(covered.sort_values(ascending=False))

print("drawn:", p.plot().save("profile.svg"))
