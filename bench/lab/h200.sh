#!/usr/bin/env bash
# Everything of bench/results that wants an H200 with vLLM 0.25.1 and Nsight's tools, by stages:
#
#   bench/lab/h200.sh OUT kernels bundles points stock together alone one served profiles
#
# kernels    judges the kernels that ship for vLLM, with compute-sanitizer and counters     about 1 min each
# bundles    makes patches of those verdicts (of bench/results/kernels where there is none)  seconds
# points     proves each patch point: receipts = nsys, fallback, revert, restart             4 min
# stock      looks for vLLM's best stock configuration                 8 min, more where one compiles
# together   all at once against that (looked for first where `stock` has not run);
#            also at batch 1 and 64 and at contexts of 4k and 8k                            13 min
# alone      each patch alone and all together, against that where `stock` has run          13 min
# one        all at once at batch 1, likewise                                                7 min
# served     all at once, each engine alone on the GPU, as it is served                       9 min
# profiles   the stock and the patched step under nsys, and the page that holds both         4 min
#
# Two may run at once, on a GPU each (CUDA_VISIBLE_DEVICES): a kernel that one has begun the other
# leaves; OUT/kernels/*.part of one that was killed is in the way until it is removed.
# Files: OUT/kernels/*.json, OUT/bundles/*.zip, OUT/points, OUT/verdicts/*, OUT/profiles. What is there
# is not made again: remove it first. `alone` goes on after its last wave (OUT/runs). PYTHON names the
# interpreter that has vLLM and patcher (`pip install -e .`: `points` finds vLLM's plugin by that).
set -euo pipefail
out=${1:?usage: bench/lab/h200.sh OUT STAGE...}; shift
here=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "$out" && cd "$out" && pwd)
python=$(command -v "${PYTHON:-python3}")
[[ $python = /* ]] || python=$PWD/$python
cd "$here"
patcher=("$python" -m patcher)
export PATCHER_RUNS_DIR=$out/runs
model=(gpt-oss-20b --engine vllm --input-len 1024)
ops=(rope_kv_update moe_route linear moe_matmul_swiglu moe_matmul_down fused_add_rms_norm reduce_add_rms_norm)
mkdir -p "$out"/{kernels,bundles,verdicts}

# the kernel that ships: made by a loop
solution() { find "kernels/$1/solutions" -mindepth 1 -maxdepth 1 -name '*_tuned' | sort | head -n 1; }
source_of() { find "$(solution "$1")" -name "$1.*" | head -n 1; }
# the first is the one that a kernel is known by, and held to the sanitizer and the counters on
sweeps_of() { if [ "$1" = linear ]; then echo layers bf16 qkv router; else echo bf16; fi; }
# verdict_of OP SWEEP
verdict_of() { local more=.$2; [[ "$(sweeps_of "$1")" = "$2"* ]] && more=; echo "$1-$(basename "$(solution "$1")")$more.json"; }
shipped() { for op in "$@"; do if [ -n "$(solution "$op")" ]; then echo "$op"; else echo "$op: no kernel of a loop yet" >&2; fi; done; }
patches() { for op in $(shipped "${ops[@]}"); do printf -- '--patch\n%s\n' "$out/bundles/$op.zip"; done; }

kernels() {
  for op in $(shipped "${ops[@]}" moe_finalize moe_reduce); do
    for sweep in $(sweeps_of "$op"); do
      local file closer=(); file=$out/kernels/$(verdict_of "$op" "$sweep")
      [ -e "$file" ] && continue
      (set -o noclobber; : > "$file.part") 2> /dev/null || continue
      [[ "$(sweeps_of "$op")" = "$sweep"* ]] && closer=(--sanitize --counters)
      "${patcher[@]}" evaluate "$op" "$(source_of "$op")" --sweep "$sweep" "${closer[@]}" --json > "$file.part" || grep -q '"outcome"' "$file.part"
      mv "$file.part" "$file"
    done
  done
}

bundles() {
  local made=()
  for op in $(shipped "${ops[@]}"); do
    [ -e "$out/bundles/$op.zip" ] && continue
    local known=()
    for sweep in $(sweeps_of "$op"); do
      local verdict; verdict=$(verdict_of "$op" "$sweep")
      for file in "$out/kernels/$verdict" "bench/results/kernels/$verdict.xz"; do
        [ -e "$file" ] && { known+=(--evaluation "$file"); break; }
      done
    done
    "${patcher[@]}" bundle "$op" "$(source_of "$op")" "$out/bundles/$op.zip" --engine vllm "${known[@]}" & made+=($!)
  done
  for job in "${made[@]}"; do wait "$job"; done
}

points() {
  "$python" -m patcher.bench.lab.vllm_points "$out/points" --jobs 4 --no-own \
    --ops "$(IFS=,; echo "${ops[*]}")"
}

# measured NAME COMMAND OPTION...: exit code 1 of a command that wrote its file is a verdict, too
measured() {
  local file=$out/verdicts/$1.json kind=$2; shift 2
  [ -e "$file" ] && return
  mapfile -t in_it < <(patches)
  "${patcher[@]}" throughput "$kind" "${model[@]}" "${in_it[@]}" "$@" --out "$file" || [ -e "$file" ]
}

stock() {
  local file=$out/verdicts/stock.json
  [ -e "$file" ] && return
  "${patcher[@]}" throughput tune "${model[@]}" --batch 8 --output-len 64 --also-batch 1 \
    --engine-arg max_cudagraph_capture_size=64 --out "$file" || [ -e "$file" ]
}

# against the best stock configuration, where `stock` has found it
against() { if [ -e "$out/verdicts/stock.json" ]; then printf -- '--tuned\n%s\n' "$out/verdicts/stock.json"; fi; }

together() {
  local best; mapfile -t best < <(against)
  [ ${#best[@]} -gt 0 ] || best=(--tune-baseline)
  measured together compare "${best[@]}" --batch 8 --output-len 64 --also-batch 1,64 --also-context 4096,8192 \
    --engine-arg max_cudagraph_capture_size=64 --report "$out/verdicts/together"
}

alone() {
  local best; mapfile -t best < <(against)
  measured alone best-set "${best[@]}" --batch 8 --output-len 64 --processes 3 --pairs 24 \
    --engine-arg max_cudagraph_capture_size=8
}

one() {
  local best; mapfile -t best < <(against)
  measured one compare "${best[@]}" --batch 1 --output-len 256 --processes 6 --pairs 60 \
    --engine-arg max_cudagraph_capture_size=1 --report "$out/verdicts/one"
}

served() {
  local best; mapfile -t best < <(against)
  measured served compare "${best[@]}" --alone --batch 8 --output-len 64 --processes 3 \
    --engine-arg max_cudagraph_capture_size=64
}

# captured NAME OPTION...
captured() {
  local kept=$out/profiles/$1; shift
  [ -e "$kept" ] && return
  rm -rf "$kept.part"
  "${patcher[@]}" profile "${model[@]}" --batch 8 "$@" --keep "$kept.part"
  mv "$kept.part" "$kept"
}

profiles() {
  mapfile -t in_it < <(patches)
  mkdir -p "$out/profiles"
  captured stock
  captured patched "${in_it[@]}"
  local before=$out/profiles/stock/decode.sqlite after=$out/profiles/patched/decode.sqlite
  "${patcher[@]}" profile --compare "$before" "$after"
  "${patcher[@]}" throughput decide "$out/verdicts/together.json" "${in_it[@]}" --profile "$before" \
    --patched-profile "$after" --report "$out/verdicts/together-profiled" || [ -e "$out/verdicts/together-profiled/report.html" ]
}

for stage in "$@"; do
  case $stage in
    kernels | bundles | points | stock | together | alone | one | served | profiles) "$stage" ;;
    *) echo "no stage $stage: see the head of $0" >&2; exit 2 ;;
  esac
done
