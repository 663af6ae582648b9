"""Several batches in one run: nsys's reports, the program's ranges, one start of the engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nsys_double
import nvtx
import pytest
import torch
from patch_sample import TINY

from patcher import bench
from patcher.bench import PatcherError, Workload
from patcher.bench.engines import Decoding
from patcher.bench.engines.transformers import TransformersEngine
from patcher.hotspot import Profile, capture, capture_batches, target

SERVED = TINY.model_copy(update={"model": "gpt-oss-20b", "engine": "vllm", "device": "cuda"})


def at(workload: Workload, *batches: int) -> list[Workload]:
    return [workload.model_copy(update={"batch": batch}) for batch in batches]


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    program = nsys_double.installed(folder, 3)
    monkeypatch.setenv("PATCHER_NSYS", str(program))
    return program


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept reports"
    folder.mkdir()
    return folder


def ranges_of(profile: Profile) -> set[str]:
    return {one.name for one in profile.kernels if one.name.startswith("kernel_of_range_")}


def test_a_report_of_each_batch(nsys: Path, kept: Path) -> None:
    # an earlier run that was killed: nsys would skip its numbers
    for stale in ("decode.nsys-rep", "decode.2.nsys-rep", "decode.10.nsys-rep"):
        (kept / stale).write_text("9")
    (kept / "decode.mine.nsys-rep").write_text("a person's own")
    stages: list[str] = []
    profiles = capture_batches(at(SERVED, 1, 64, 8), kept, stages.append)
    assert [ranges_of(one) for one in profiles] == [{f"kernel_of_range_{n}"} for n in (1, 2, 3)]
    assert [one.source for one in profiles] == [
        f"nsys export decode.batch{batch}.sqlite" for batch in (1, 64, 8)
    ]
    assert stages == ["profile under nsys", *(f"export, batch {batch}" for batch in (1, 64, 8))]
    reports = {
        f"decode.batch{batch}.{end}" for batch in (1, 64, 8) for end in ("nsys-rep", "sqlite")
    }
    assert {file.name for file in kept.iterdir()} == {*reports, "decode.mine.nsys-rep"}
    command = Path(f"{nsys}.command").read_text().splitlines()
    assert "--capture-range-end=repeat:3" in command
    assert "--capture-range-end=stop" not in command
    told = json.loads(command[command.index("patcher.hotspot.target") + 1])
    assert [one["batch"] for one in told] == [1, 64, 8]
    assert command[-1] == "nsys"


def test_one_batch_is_one_report_as_it_was(nsys: Path, kept: Path) -> None:
    (kept / "decode.nsys-rep").write_text("9")
    profile = capture(SERVED, kept)
    assert ranges_of(profile) == {"kernel_of_range_1"}
    assert {file.name for file in kept.iterdir()} == {"decode.nsys-rep", "decode.sqlite"}
    command = Path(f"{nsys}.command").read_text().splitlines()
    assert "--capture-range-end=stop" in command


def test_a_checkout_may_have_a_space_in_its_path(nsys: Path, kept: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    checkout.symlink_to(Path(nsys_double.__file__).parents[1])
    nsys_double.installed(nsys.parent, 1, str(checkout / "support/nsys_double.py"))
    assert ranges_of(capture(SERVED, kept)) == {"kernel_of_range_1"}


@pytest.mark.parametrize(
    ("ranges", "batches", "said"),
    [
        (2, (1, 8, 64), "of each of 3 batches and wrote 2: decode.1.nsys-rep, decode.2.nsys-rep"),
        (0, (1, 8), "wrote no report"),
        (0, (8,), "wrote no report"),
    ],
)
def test_too_few_reports_are_an_error(
    ranges: int, batches: tuple[int, ...], said: str, nsys: Path, kept: Path
) -> None:
    nsys_double.installed(nsys.parent, ranges)
    (kept / "decode.nsys-rep").write_text("9")
    with pytest.raises(PatcherError, match=said):
        capture_batches(at(SERVED, *batches), kept)


class Watched(TransformersEngine):
    """An engine that notes what is asked of it."""

    notes: list[str]

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.notes.append(f"started for {workload.batch}")

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        self.notes.append(f"prefill {len(prompts)}")
        return super().prefill(prompts)

    def decode(self, decoding: Decoding, steps: int) -> None:
        super().decode(decoding, steps)
        self.notes.append(f"{steps} of {len(decoding.picked[-1])}")

    def release(self, decoding: Decoding) -> None:
        self.notes.append(f"released {len(decoding.picked[-1])}")
        super().release(decoding)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine, the capture ranges and the ranges `decode` say, in order."""
    said: list[str] = []

    @contextmanager
    def capture_range() -> Iterator[None]:
        said.append("capture")
        yield
        said.append("captured")

    monkeypatch.setattr(Watched, "notes", said, raising=False)
    monkeypatch.setattr(target, "open_decoder", Watched)
    monkeypatch.setattr(target, "capture_range", capture_range)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        nvtx, "push_range", lambda name: said.append(name) if name == "decode" else None
    )
    monkeypatch.setattr(nvtx, "pop_range", lambda: None)
    return said


def steps_of(batch: int, steps: int) -> list[str]:
    return steps * [f"1 of {batch}"]


def test_a_capture_range_of_each_batch_in_one_engine(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = json.dumps([one.model_dump() for one in at(TINY, 1, 3, 2)])
    monkeypatch.setattr(sys, "argv", ["target", workloads, "2", "nsys"])
    assert target.main() == 0
    expected = ["started for 3"]
    for batch in (1, 3, 2):
        expected += [f"prefill {batch}", f"{target.WARM_UP_STEPS} of {batch}"]
        expected += ["capture", "decode", *steps_of(batch, 2), "captured", f"released {batch}"]
    assert notes == expected


def test_a_file_of_torch_profiler_of_each_batch(
    notes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outs = [tmp_path / "one.json", tmp_path / "three.json"]
    workloads = json.dumps([one.model_dump() for one in at(TINY, 1, 3)])
    monkeypatch.setattr(sys, "argv", ["target", workloads, "2", "torch", *map(str, outs)])
    assert target.main() == 0
    assert [note for note in notes if note.startswith("started")] == ["started for 3"]
    norms = 2 * (2 * bench.preset("gpt-oss-tiny").layers + 1)
    for out in outs:
        rows = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
        assert rows["module::GptOssRMSNorm"]["instances"] == norms, "of the batch's own two steps"


def test_two_batches_on_the_cpu(tmp_path: Path) -> None:
    """The real program, in a process of its own."""
    one, three = capture_batches(at(TINY, 1, 3), tmp_path, steps=2)
    for profile in (one, three):
        assert [warning.kind for warning in profile.warnings] == ["cpu_operators"]
        assert profile.steps == 2
        norms = {spot.name: spot for spot in profile.hotspots}["module::GptOssRMSNorm"]
        assert norms.per_step == 2 * bench.preset("gpt-oss-tiny").layers + 1
    assert {file.name for file in tmp_path.iterdir()} == {
        "torch.batch1.json",
        "torch.batch3.json",
    }
