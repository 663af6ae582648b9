"""Run the agent loop with a strategy of your own, which a package of yours brings: my_strategy."""

import shutil
import subprocess
import sys
from pathlib import Path

import patcher

# usually: pip install ./my_strategy; here it goes into a folder that is removed with the rest
shutil.copytree(Path(__file__).parent / "my_strategy", "my_strategy", dirs_exist_ok=True)
pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
subprocess.run([*pip, "--upgrade", "--target", "installed", "./my_strategy"], check=True)
sys.path.append("installed")

r = patcher.optimize(
    "fused_add_rms_norm", strategy="until-right", model="replay:demo", iterations=2
)
print(r)
print(r.to_pandas()[["iteration", "outcome", "speedup"]].to_string(index=False))
print("it ended:", r.loop_ended.detail if r.loop_ended else "not yet")
