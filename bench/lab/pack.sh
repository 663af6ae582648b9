#!/usr/bin/env bash
# Packs what a GPU host without network needs beside an engine and its torch: patcher with bench/lab,
# the libraries that it imports, the kernels' sources, and patches for a version of vLLM: `bundles`
# from the verdicts of bench/results/h100-kernels, which stand together, and `blocks`, which the H200
# of bench/results/kernels judged.
#
#   bench/lab/pack.sh OUT VLLM_VERSION [PYTHON_VERSION]
#
# OUT/host.tar.xz is for `tar xJf host.tar.xz -C DIR` there, then `source DIR/activate` after the
# engine's own environment. numpy and pandas are left out: the host has them. PYTHON names the
# interpreter of this checkout (.venv/bin/python). Needs pip, nvcc for patches in CUDA, and network.
set -euo pipefail
out=${1:?usage: bench/lab/pack.sh OUT VLLM_VERSION [PYTHON_VERSION]}
version=${2:?a version of vLLM, such as 0.33.0}
there=${3:-3.12}
here=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
out=$(mkdir -p "$out" && cd "$out" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
host=$work/host
mkdir -p "$host/packages" "$host/bundles" "$host/blocks"
cd "$work"

"$here/bench/lab/wheels.sh" wheels "$there" scipy
"$python" -m pip wheel -q --no-deps -w wheels "$here"
for wheel in wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$host/packages"; done
cp -r "$here/bench/lab" "$host/packages/patcher/bench/lab"
cp -r "$here/kernels" "$host/kernels"

# the same patches, bit by bit, for as long as what they are made of is the same
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0}
# a patch names what it replaces by its source, for which the wheel's Python is enough
tree=$(cd "$here" && PYTHONPATH=tests/support "$python" -P -c "import vllm_trees; print(vllm_trees.tree('$version'))")
mkdir -p "engine/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" > "engine/vllm-$version.dist-info/METADATA"
PIP_CONSTRAINT=/dev/null "$python" -m pip install -q --no-deps --target engine triton
make_bundle() {  # OP FOLDER_OF_VERDICTS TARGET
  local op=$1 folder known=()
  for verdict in "$here/bench/results/$2/$op"-*.json.xz; do known+=(--evaluation "$verdict"); done
  folder=$here/kernels/$op/solutions/$(basename "${known[1]}" | sed "s/^$op-//; s/\..*//")
  PYTHONPATH=$work/engine:$tree "$python" -P -m patcher bundle "$op" "$(ls "$folder/$op".*)" "$3" \
    --language "$(sed -n 's/^language = "\(.*\)"/\1/p' "$folder/solution.toml")" --engine vllm \
    "${known[@]}" < /dev/null
}
for verdict in "$here"/bench/results/h100-kernels/*.json.xz; do basename "$verdict" | cut -d- -f1; done | sort -u > ops
while read -r op; do make_bundle "$op" h100-kernels "$host/bundles/$op.zip"; done < ops
# not beside those: they take over their layers, or exclude them
for op in moe_block qkv_rope_kv_update add_rms_norm_route qk_norm_rope silu_and_mul; do
  make_bundle "$op" kernels "$host/blocks/$op.zip"
done
cat > "$host/activate" <<'ACTIVATE'
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/packages"
ACTIVATE
tar cJf "$out/host.tar.xz" -C "$host" .
du -h "$out/host.tar.xz"
