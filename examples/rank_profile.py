"""Rank a profile: python rank_profile.py decode.nsys-rep (or .sqlite, a csv, a torch trace)."""

import sys
from pathlib import Path

import patcher

SAMPLE = Path(__file__).parents[1] / "tests/data/nsys/decode.sqlite"

p = patcher.profile(sys.argv[1] if len(sys.argv) > 1 else SAMPLE, model="gpt-oss-20b")
for warning in p.warnings:
    print(f"{warning.kind}: {warning.message}")

frame = p.to_pandas()
shown = frame[["rank", "share_pct", "mean_ns", "ceiling_pct", "triage", "name"]].head(10)
print(shown.assign(name=shown["name"].str.slice(0, 60)).to_string(index=False))

# where does an op of the kernel library cover a hotspot?
covered = frame.dropna(subset="op").groupby("op")["share_pct"].sum()
print(covered.sort_values(ascending=False))

print("drawn:", p.plot().save("profile.svg"))
