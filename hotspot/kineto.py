from pathlib import Path

from hotspot.recording import Recording


def read_kineto(path: Path) -> Recording:
    raise NotImplementedError
