#!/usr/bin/env bash
# What racecheck of each compute-sanitizer given says of racecheck.cu's kernels, as a table; on a
# Hopper GPU, with nvcc:
#
#   bench/lab/racecheck.sh OUT [COMPUTE_SANITIZER ...]
#
# OUT/NAME-VERSION.log: what the tool printed first. `+ proxies`: where a version looks for a missing
# proxy fence before a bulk copy, which is on by default, that was left on; else it is off.
set -euo pipefail
out=${1:?usage: bench/lab/racecheck.sh OUT [COMPUTE_SANITIZER ...]}; shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
[ $# -gt 0 ] || set -- compute-sanitizer
nvcc -O2 -std=c++17 -arch=sm_90a -lineinfo -o "$out/racecheck" "$here/racecheck.cu"
kernels=(ring-all ring-one adder-all adder-one guide ring-early ring-unordered adder-unordered)

# checked KERNEL LABEL TOOL OPTION...
checked() {
  local log=$out/$1-$2.log
  timeout 120 "$3" --tool racecheck --racecheck-report all --show-backtrace no --print-limit 1000 "${@:4}" "$out/racecheck" "$1" \
    > "$log.all" 2>&1 || true
  head -c 4000 "$log.all" > "$log"
  grep -aoE 'RACECHECK SUMMARY.*' "$log.all" | grep -oE '[0-9]+ errors?' > "$log.errors" || echo "no end" > "$log.errors"
  rm "$log.all"
}

labels=()
for tool in "$@"; do
  version=$("$tool" --version | grep -oE '[0-9]{4}\.[0-9]+(\.[0-9]+)?' | head -n 1)
  sorts=("$version")
  "$tool" --help | grep -q -- --racecheck-fence-proxy-async && sorts=("$version + proxies" "$version")
  for sort in "${sorts[@]}"; do
    options=()
    [ ${#sorts[@]} = 2 ] && [ "$sort" = "$version" ] && options=(--racecheck-fence-proxy-async no)
    labels+=("$sort")
    for kernel in "${kernels[@]}"; do checked "$kernel" "${sort// /}" "$tool" "${options[@]}" & done
    wait
  done
done

printf '| kernel | gives |'; printf ' %s |' "${labels[@]}"; printf '\n| --- | --- |'; printf ' ---: |%.0s' "${labels[@]}"; echo
for kernel in "${kernels[@]}"; do
  said=$(timeout 20 "$out/racecheck" "$kernel" || true)
  said=${said#*: }; printf '| `%s` | %s |' "$kernel" "${said%% *}"
  for sort in "${labels[@]}"; do printf ' %s |' "$(cat "$out/$kernel-${sort// /}.log.errors")"; done
  echo
done
