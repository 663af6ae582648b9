#!/usr/bin/env bash
# Downloads what patcher imports, for a host without network that has torch, numpy and pandas.
#
#   bench/lab/wheels.sh FOLDER [PYTHON_VERSION] [PACKAGE...]
#
# Each PACKAGE comes without what it needs itself. PYTHON names the interpreter of this checkout
# (.venv/bin/python). Needs pip and network.
set -euo pipefail
folder=${1:?usage: bench/lab/wheels.sh FOLDER [PYTHON_VERSION] [PACKAGE...]}
there=${2:-3.12}
python=${PYTHON:-$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/python}
platforms=(); for minor in 28 27 17; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
fetch() {
  PIP_CONSTRAINT=/dev/null "$python" -m pip download -q -d "$folder" --only-binary=:all: --implementation cp \
    --python-version "$there" "${platforms[@]}" --platform manylinux2014_x86_64 "$@"
}
fetch pydantic rich typer jinja2
fetch --no-deps tomlkit packaging adbc-driver-manager adbc-driver-sqlite nanoarrow nvidia-ml-py nvtx \
  apache-tvm-ffi "${@:3}"
