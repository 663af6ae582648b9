"""Read what runs have found into one data frame: python read_run.py [RUN ...]"""

import sys
from pathlib import Path

import pandas

import patcher

names = sys.argv[1:] or [path.parent.name for path in Path("patcher-runs").glob("*/run.json")]
if not names:  # none here yet
    names = [patcher.optimize("fused_add_rms_norm", model="replay:demo", iterations=1).run_id]

runs = [patcher.read_run(name) for name in names]
frame = pandas.concat([run.to_pandas().assign(run=run.run_id) for run in runs])
print(frame[["run", "iteration", "outcome", "speedup"]].to_string(index=False))

right = frame[frame["outcome"] == "correct"]
print(right.groupby("run")["speedup"].max())

for run in runs:
    if run.best and run.best.timings:
        sizes = pandas.DataFrame([t.axes | {"speedup": t.speedup} for t in run.best.timings])
        print(f"the best of {run.run_id} by size")
        print(sizes.to_string(index=False))
