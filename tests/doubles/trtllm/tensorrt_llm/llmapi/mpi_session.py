"""Double: a pool of worker processes, by mpi4py's MPIPoolExecutor where MPI is at hand.

Without MPI (`TRTLLM_DOUBLE_POOL=subprocess`) Python processes stand in for MPI's. They speak the
same protocol: a new interpreter, nothing of the parent's environment but what is handed over,
`path` in front of sys.path, tasks and results pickled, ranks in OMPI_COMM_WORLD_RANK.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

POOL = "TRTLLM_DOUBLE_POOL"
_NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")
"""What MPI's own launcher knows from when it was started."""
_SERVER = """
import os, pickle, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path[:0] = pickle.load(sys.stdin.buffer)
while True:
    try:
        task, args, kwargs = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    pickle.dump(task(*args, **kwargs), answers)
    answers.flush()
"""


class MpiPoolSession:
    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        env = {k: v for k, v in os.environ.items() if k.startswith(("TRTLLM", "TLLM"))}
        self.mpi_pool: Any
        if os.environ.get(POOL) == "subprocess":
            self.mpi_pool = _SubprocessPool(max_workers=n_workers, path=sys.path, env=env)
        else:
            from mpi4py.futures import MPIPoolExecutor

            self.mpi_pool = MPIPoolExecutor(max_workers=n_workers, path=sys.path, env=env)

    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        return [self.mpi_pool.submit(task, *args, **kwargs) for _ in range(self.n_workers)]

    def shutdown(self, wait: bool = True) -> None:
        self.mpi_pool.shutdown(wait=wait)


class _SubprocessPool:
    """Worker N takes every N-th task, as MPI's workers do that each hold one."""

    def __init__(self, max_workers: int, path: list[str], env: dict[str, str]) -> None:
        base = {name: os.environ[name] for name in _NEEDED if name in os.environ}
        self._workers = []
        for rank in range(max_workers):
            ranks = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(max_workers)}
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", _SERVER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=base | env | ranks,
                )
            )
            self._send(self._workers[-1], path)
        self._tasks = 0
        self._threads = ThreadPoolExecutor(max_workers)

    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        worker = self._workers[self._tasks % len(self._workers)]
        self._tasks += 1
        self._send(worker, (task, args, kwargs))
        assert worker.stdout is not None
        return self._threads.submit(pickle.load, worker.stdout)

    def shutdown(self, wait: bool = True) -> None:
        self._threads.shutdown(wait=wait)
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            worker.wait()

    @staticmethod
    def _send(worker: subprocess.Popen[bytes], what: Any) -> None:
        assert worker.stdin is not None
        pickle.dump(what, worker.stdin)
        worker.stdin.flush()
