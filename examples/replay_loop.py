"""Run the agent loop without a key: the replies are the recorded ones of `patcher demo`.

Building, checking and timing happen here and now. With a key: model="anthropic".
"""

import patcher

r = patcher.optimize("fused_add_rms_norm", language="cpp", model="replay:demo", iterations=1)
print(r)
print(
    r.to_pandas()[["iteration", "outcome", "speedup", "input_tokens", "output_tokens"]].to_string(
        index=False
    )
)
print("the page:", r.folder / "report.html")
if r.best:
    print(r.candidate_source)
