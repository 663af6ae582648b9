#!/usr/bin/env bash
# On the host: judges every open job, and puts what has to come back into OUT.
#
#   bash travel/sitting.sh OUT [--limit-s 400] [--job-s 120] [--gpus 0,1] [--any-machine]
#
# PYTHON is the host's interpreter, which has torch (python3); WORK a folder that is filled and cleared
# (/tmp/sitting). What baselines compiled comes back, too, for the next sitting, if it takes at most
# MOST_CACHE_MB (30), in parts of PART_MB (15). Exit code 0: all was judged; 1: jobs are left;
# 9: this is another machine than before, and nothing was judged.
set -u
out=${1:?usage: sitting.sh OUT [OPTIONS]}; shift
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(mkdir -p "$out" && cd "$out" && pwd) || exit 2
rm -f "$out"/back.tar.xz "$out"/cache.tar.xz.*
work=${WORK:-/tmp/sitting}; python=${PYTHON:-python3}
mkdir -p "$work" && cd "$work" || exit 2
work=$PWD
rm -rf exchange imported log site
mkdir -p exchange cache home log
tar xJf "$kit/site.tar.xz" && tar xJf "$kit/jobs.tar.xz" || exit 2
if ls "$kit"/cache.tar.xz.* > /dev/null 2>&1; then
  cat "$kit"/cache.tar.xz.* | tar xJ -C cache || echo "the caches are damaged: baselines are compiled anew"
fi
export PYTHONPATH=$work/site PATCHER_OPS=$work/imported PATCHER_CACHE=$work/cache PATCHER_HOME=$work/home
[ -d imported ] || unset PATCHER_OPS
export PATH=$PATH:/usr/local/cuda/bin
echo "unpacked after $SECONDS s"
"$python" -P -m patcher.bench.lab.sittings.sit exchange log "$@" 2>&1
code=$?
[ $code = 0 ] || [ $code = 1 ] || exit $code
mkdir -p exchange/results exchange/machines  # a worker that could not begin made none
tar c exchange/results exchange/machines $(ls -d exchange/put-off 2>/dev/null) log | xz -T0 > "$out/back.tar.xz"

# of what baselines compiled: their graphs' cache holds the kernels, so Triton's own folder is left out
cd cache || exit 2
times=$(ls -d strongest ceilings 2>/dev/null)
graphs=$(ls -d baselines/inductor/{fxgraph,aotautograd,cache} 2>/dev/null; find baselines/inductor -name '*.best_config' 2>/dev/null)
packed() { if [ -n "${*// /}" ]; then tar c "$@" | xz -T0 -3 > ../cache.tar.xz; fi; }
rm -f ../cache.tar.xz
packed $times $graphs
if [ -f ../cache.tar.xz ] && [ "$(stat -c %s ../cache.tar.xz)" -gt $(( ${MOST_CACHE_MB:-30} << 20 )) ]; then
  echo "the compiled baselines take more than ${MOST_CACHE_MB:-30} MB: only their times are kept"
  rm ../cache.tar.xz
  packed $times
fi
[ -f ../cache.tar.xz ] && split -b "${PART_MB:-15}M" ../cache.tar.xz "$out/cache.tar.xz."
ls -l "$out"; echo "the sitting took $SECONDS s"
exit $code
