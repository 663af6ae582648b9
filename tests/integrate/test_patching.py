"""The commands around patches: verify, patches, apply, revert, receipts, bundle."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_matrix import ANY, feature
from patch_sample import CANDIDATE, OP, evaluation, make_patch
from proof_sample import TRITON, claims, patched_profile, triton_patch

import patcher.integrate.patch
from patcher import bench, patch_findings
from patcher.bench.judge.evaluation import Grade
from patcher.cli import main
from patcher.integrate import Patch, Receipt, pack


class GptOssRMSNorm(torch.nn.Module):
    """A release that changed the norm."""


Cli = Callable[..., tuple[int, Any]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command in this process, gives its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PATCHES", "RECEIPTS", "STRICT"):
        monkeypatch.delenv(f"PATCHER_{name}", raising=False)
        monkeypatch.delenv(f"TLLM_PATCHER_{name}", raising=False)

    def run(*words: str) -> tuple[int, Any]:
        monkeypatch.setattr(sys, "argv", ["patcher", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        if "--json" in words:
            return caught.value.code, json.loads(said.out)
        return caught.value.code, said.out + said.err

    return run


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    return make_patch(tmp_path / "patch")


def checks(document: dict[str, Any]) -> dict[str, Any]:
    return {check["name"]: check for check in document["checks"]}


def test_a_patch_that_fits_says_what_was_looked_at(cli: Cli, patch: Patch) -> None:
    pack(patch, Path("patch.zip"))
    for name in ("patch", "patch.zip"):
        code, found = cli("verify", name, "--json")
        assert (code, found["fits"], found["id"]) == (0, True, patch.manifest.id)
        assert found["digest"] == patch.digest
    assert list(checks(found)) == ["files", "evidence", "version", "source", "device", "kernel"]
    assert "GptOssDecoderLayer, GptOssRMSNorm" in checks(found)["source"]["detail"]
    code, said = cli("verify", "patch")
    assert code == 0
    assert said.count("ok ") == 6


def test_a_lower_grade_is_said(cli: Cli, tmp_path: Path) -> None:
    low = evaluation().model_copy(
        update={"grade": Grade.OWN_PROCESS, "grade_reason": "a call has a function on the host"}
    )
    Patch.create(tmp_path / "low", OP, CANDIDATE, low, engine="transformers", made_by="test")
    told = "judged in its own process, a lower grade than device code alone"
    assert told in checks(cli("verify", "low", "--json")[1])["evidence"]["detail"]
    said = cli("apply", "low", "--yes")[1]
    assert f"{told}: a call has a function on the host" in said.replace("\n", " ")
    found = cli("apply", "low", "--yes", "--json")[1]
    assert found["grade"] == f"{told}: a call has a function on the host"


def test_a_changed_target_is_told_by_name_and_diff(
    cli: Cli, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss

    cli("apply", "patch", "--yes")

    monkeypatch.setattr(modeling_gpt_oss, "GptOssRMSNorm", GptOssRMSNorm)
    code, found = cli("verify", patch.manifest.id, "--json")
    assert (code, found["fits"], found["error"]["kind"]) == (5, False, "verification")
    assert found["error"]["message"].endswith(": GptOssRMSNorm changed")
    [change] = checks(found)["source"]["changes"]
    assert (change["name"], change["change"]) == ("GptOssRMSNorm", "changed")
    assert '+    """A release that changed the norm."""' in change["diff"]
    assert "-class GptOssRMSNorm(nn.Module):" in change["diff"]
    assert len(change["diff"].splitlines()) <= 41
    assert checks(found)["kernel"]["passed"] in (True, False), "what comes after is asked, too"
    code, said = cli("verify", "patch")
    assert code == 5
    assert "-class GptOssRMSNorm(nn.Module):" in said
    assert "next: make the patch again" in said
    code, found = cli("apply", "patch", "--yes", "--json")
    assert (code, found["error"]["kind"]) == (5, "verification")
    _, found = cli("patches", "--json")
    assert found["patches"][0]["why_not"].endswith(": GptOssRMSNorm changed")


def test_what_is_gone_and_what_is_new_is_told(patch: Patch) -> None:
    from patcher.integrate.changes import what_changed
    from patcher.integrate.points import source_digest

    target = patch.manifest.target
    now = source_digest(json.dumps, json.JSONEncoder)
    found = {change.name: change.change for change in what_changed(target, now)}
    assert found == {
        "GptOssDecoderLayer": "gone",
        "GptOssRMSNorm": "gone",
        "dumps": "new",
        "JSONEncoder": "new",
    }
    assert what_changed(target, "a plain digest") == []
    both = source_digest(json.load, tomllib.load)
    assert list(both.parts) == ["load", "tomllib._parser.load"], "two of one name are two"
    made: dict[str, Any] = {}
    exec("def put_there(): pass", made)
    with pytest.raises(bench.VerificationError, match="put_there has no source text"):
        source_digest(made["put_there"])


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["verify", "nothing"], 2, "usage"),
        (["verify", "nothing.zip"], 2, "usage"),
        (["verify", "damaged.zip"], 5, "verification"),
        (["verify", "spoilt"], 5, "verification"),
        (["apply", "spoilt", "--yes"], 5, "verification"),
        (["apply", "damaged.zip", "--dry-run"], 5, "verification"),
        (["apply", "patch"], 2, "usage"),
        (["receipts", "nothing"], 2, "usage"),
        (["receipts", "empty"], 5, "verification"),
        (["receipts", "spoilt"], 5, "verification"),
        (["receipts", "empty", "--before", "x"], 2, "usage"),
        (["bundle", OP.name, "x.cpp", "y", "--tensor-parallel", "two"], 2, "usage"),
    ],
)
def test_bad_input_has_its_code(
    cli: Cli, patch: Patch, words: list[str], code: int, kind: str
) -> None:
    Path("damaged.zip").write_text("PK no more")
    Path("empty").mkdir()
    spoilt = make_patch(Path("spoilt")).folder
    (spoilt / "sources" / "fused_add_rms_norm.cpp").write_text("other")
    found, document = cli(*words, "--json")
    assert (found, document["error"]["kind"]) == (code, kind)
    assert document["error"]["hint"]
    assert "\n" not in document["error"]["message"]
    assert not Path("home").exists()


def test_another_version_is_refused_by_its_number(
    cli: Cli, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patcher.integrate.patch, "engine_version", lambda engine: "4.57.0")
    code, found = cli("verify", "patch", "--json")
    assert code == 5
    assert "4.57.0 is installed" in found["error"]["message"]


def test_apply_says_how_it_runs_and_patches_whether_it_does(
    cli: Cli, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = patch.manifest.id
    assert cli("apply", "patch", "--dry-run", "--json")[1]["applied"] is False
    assert cli("patches", "--json")[1]["patches"] == []
    pack(patch, Path("patch.zip"))
    code, said = cli("apply", "patch.zip", "--yes")
    assert code == 0
    for word in ("PATCHER_PATCHES=on", "integrate.activate", "PATCHER_RECEIPTS", f"revert {name}"):
        assert word in said
    for switches, on in (("", False), ("on", True), (f"x, {name}", True), ("x", False)):
        monkeypatch.setenv("PATCHER_PATCHES", switches)
        [row] = cli("patches", "--json")[1]["patches"]
        assert (row["id"], row["on"], row["fits"], row["evidence"]) == (name, on, True, "2.000x")
    assert "PATCHER_PATCHES=on" in cli("patches")[1]
    (Path("home/patches") / name / "more").write_text("x")
    [row] = cli("patches", "--json")[1]["patches"]
    assert not row["fits"]
    assert "does not belong to the patch" in row["why_not"]
    assert cli("revert", name, "--json") == (0, {"id": name, "reverted": True})
    assert cli("revert", name, "--json") == (0, {"id": name, "reverted": False})


def test_a_mistyped_id_is_not_reverted(cli: Cli, patch: Patch) -> None:
    code, said = cli("revert", "typo")
    assert (code, "no patch 'typo' was ever applied" in said) == (2, True)
    cli("apply", "patch", "--yes")
    code, said = cli("revert", "typo")
    assert code == 2
    assert f"applied patches: {patch.manifest.id}" in " ".join(said.split())


@pytest.mark.parametrize("place", ["home", "home/in"])
def test_a_file_in_the_place_of_the_store_is_one_sentence(
    cli: Cli, patch: Patch, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    Path("home").write_text("a file")
    monkeypatch.setenv("PATCHER_HOME", place)
    for words in (("patches",), ("apply", "patch", "--yes"), ("revert", "x"), ("ops",)):
        code, said = cli(*words)
        if words == ("ops",):
            assert code == 0
            continue
        assert code == 2, words
        assert "is a file, where" in said
        assert "set PATCHER_HOME to a folder" in " ".join(said.split())
    found = {each["name"]: each for each in cli("doctor", "--json")[1]["findings"]}
    assert "is a file, where" in str(found)


def test_doctor_tells_the_store_and_the_switches(
    cli: Cli, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher import doctor, patch_findings

    def told() -> tuple[str, str, str, str]:
        store, switches = patch_findings._store(), patch_findings._switches()
        return store.status, store.detail, switches.status, switches.detail

    assert told()[:3] == ("ok", "0 applied", "ok")
    cli("apply", "patch", "--yes")
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    assert told()[:3] == ("ok", "1 applied", "warn")
    monkeypatch.setenv("TLLM_PATCHER_RECEIPTS", "receipts")
    monkeypatch.setenv("PATCHER_STRICT", "1")
    assert told()[2:] == ("ok", "PATCHER_PATCHES=on, what fails raises; receipts are kept")
    monkeypatch.setenv("PATCHER_PATCHES", "another")
    assert "not applied: another" in told()[3]
    Path("home/applied.json").write_text("{")
    assert told()[0] == "fail"
    monkeypatch.setenv("PATCHER_HOME", "patch/manifest.json/home")
    assert told()[0] == "fail"
    assert told()[1].endswith("manifest.json is a file, where patches and memory need a folder")
    found = {item.name for item in doctor.examine()}
    assert {"patch store", "patch switches"} <= found


def test_receipts_are_told_by_process(cli: Cli) -> None:
    folder = Path("receipts")
    folder.mkdir()
    label = "op tokens=2 hidden=8 float32"
    ran = Receipt(
        patch_id="p",
        digest="d",
        pid=2,
        rank=1,
        point="vllm:norm",
        calls={label: 50},
        replayed={label: 48},
        fallbacks={"not contiguous": 3},
    )
    ran.write(folder / "p.2.json")
    Receipt(patch_id="p", digest="d", pid=1, point="vllm:norm").write(folder / "p.1.json")
    code, found = cli("receipts", "receipts", "--json")
    assert (code, found["problems"], found["proofs"]) == (0, [], [])
    assert [one["pid"] for one in found["receipts"]] == [1, 2]
    said = cli("receipts", "receipts")[1]
    for word in ("vllm:norm", "50", "48", "3: not contiguous", label):
        assert word in said
    Receipt(patch_id="q", digest="d", pid=1, failure="no GPU").write(folder / "q.1.json")
    code, found = cli("receipts", "receipts", "--json")
    assert code == 5
    assert found["problems"] == ["q in process 1: no GPU", "q never ran in any process"]


def test_brackets_in_a_receipt_are_shown_as_they_are(cli: Cli) -> None:
    """Reasons and names of classes may look like markup to the library that draws tables."""
    folder = Path("receipts")
    folder.mkdir()
    ran = Receipt(
        patch_id="p",
        digest="d",
        pid=1,
        host="a",
        point="vllm:[/norm]",
        calls={"norm [rows] int8[/b]": 2},
        layers_taken=1,
        layers_refused={"a norm of class Scaled[float]": 1},
    )
    ran.write(folder / "p.1.json")
    ran.model_copy(update={"host": "[b]", "pid": 2}).write(folder / "p.2.json")
    code, said = cli("receipts", "receipts")
    assert code == 0
    shown = "".join(said.split())
    for word in ("[b]", "vllm:[/norm]", "norm [rows] int8[/b]", "Scaled[float]"):
        assert word.replace(" ", "") in shown


def test_receipts_and_doctor_say_what_a_patch_did_not_do(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("receipts")
    folder.mkdir()
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    monkeypatch.setenv("PATCHER_RECEIPTS", str(folder))

    def leaves(patch_id: str, **more: Any) -> None:
        receipt = Receipt(patch_id=patch_id, digest="d", pid=1, point="vllm:linear", **more)
        receipt.write(folder / f"{patch_id}.1.json")

    def doctor_says() -> dict[str, Any]:
        [found] = (
            one for one in cli("doctor", "--json")[1]["findings"] if one["name"] == "receipts"
        )
        return dict(found)

    assert doctor_says()["detail"] == "none yet"
    leaves("ran", calls={"linear tokens=1": 4}, layers_taken=72, layers_refused={"odd": 24})
    assert doctor_says()["status"] == "ok"
    leaves("idle", layers_taken=0, layers_refused={"weights by Fp8LinearMethod": 96})
    leaves("large", layers_taken=96, fallbacks={"tokens above 48": 98_280})
    leaves("alone", layers_taken=0)
    leaves("unasked", layers_taken=2)
    problems = [
        "alone never ran in any process: no layer is of its role",
        "idle never ran in any process: no layer takes it "
        "(0 of 96 layers; 96: weights by Fp8LinearMethod)",
        "large never ran in any process: every call fell back",
        "unasked never ran in any process: no call reached it",
    ]
    code, found = cli("receipts", "receipts", "--json")
    assert (code, found["problems"]) == (5, problems)
    said = " ".join(cli("receipts", "receipts")[1].split())
    for words in ("72 of 96 layers", "98,280: tokens above 48"):
        assert words in said
    assert doctor_says()["status"] == "warn"
    assert "idle never ran: no layer takes it" in doctor_says()["detail"]
    (folder / "damaged.json").write_text("{")
    assert "is not a receipt" in doctor_says()["detail"]


@feature("`VLLM_PLUGINS` without patcher, told by `doctor`", "refused", ANY)
def test_doctor_says_that_vllm_would_not_load_the_plugin(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status() -> str:
        [found] = (
            one for one in cli("doctor", "--json")[1]["findings"] if one["name"] == "vLLM plugin"
        )
        return str(found["status"])

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    assert status() == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert status() == "fail"
    assert "VLLM_PLUGINS=other excludes" in cli("doctor")[1]
    assert "VLLM_PLUGINS=other excludes" in " ".join(cli("patches")[1].split())
    assert cli("patches", "--json")[1]["warnings"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,patcher")
    assert status() == "ok"
    assert not cli("patches", "--json")[1]["warnings"]
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("PATCHER_PATCHES", "off")
    assert status() == "warn"


def test_doctor_says_that_vllm_would_not_find_the_plugin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a checkout that is not installed, or with an installation that Python leaves out."""
    monkeypatch.setattr(patch_findings, "entry_points", lambda **_: ())
    monkeypatch.setenv("PATCHER_PATCHES", "on")
    assert "no entry point of patcher" in cli("doctor")[1]
    made = tmp_path / "patcher-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: patcher\nVersion: 1\n")
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    [found] = (
        one for one in cli("doctor", "--json")[1]["findings"] if one["name"] == "vLLM plugin"
    )
    assert found["status"] == "fail"
    assert str(tmp_path) in found["detail"]
    assert "PYTHONNOUSERSITE" in found["fix"]


def test_receipts_are_held_against_a_profile(cli: Cli, tmp_path: Path) -> None:
    made = triton_patch(tmp_path / "patch")
    patched = patched_profile(tmp_path / "patched.sqlite", f"{TRITON}_0")
    Path("receipts").mkdir()
    claims(made, 5000).write(Path("receipts/p.json"))
    words = ("receipts", "receipts", "--profile", str(patched), "--json")
    code, document = cli(*words)
    assert (code, document["error"]["kind"]) == (2, "usage"), "the patch is not applied"
    code, document = cli(*words, "--patch", "patch", "--model", "gpt-oss-20b")
    assert code == 0, document
    [proof] = document["proofs"]
    assert proof["passed"]
    claims(made, 5).write(Path("receipts/p.json"))
    assert cli(*words, "--patch", "patch")[0] == 5
    assert "claim 5 calls only" in cli(*words[:-1], "--patch", "patch")[1]


def test_a_candidate_is_bundled_as_a_folder_or_one_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is stood in for: its verdict is given, all else is real."""
    from patcher.bench import judge

    good = next(found for info, found in OP.solutions() if info.name == "cpu_simd")
    Path("kernel.cpp").write_text(good.source)
    monkeypatch.setattr(judge, "evaluate", lambda candidate, *rest: evaluation(candidate))
    for target in ("made", "made.zip"):
        words = ("bundle", OP.name, "kernel.cpp", target, "--tensor-parallel", "2,1", "--json")
        code, found = cli(*words)
        assert (code, found["guards"]["tensor_parallel"]) == (0, [1, 2])
        assert len(found["binaries"]) == 1
        assert cli("verify", target, "--json")[1]["id"] == found["id"]
    assert good.digest != CANDIDATE.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel.cpp", "made", "made.zip"]


def test_a_candidate_that_was_judged_is_bundled_on_that_verdict(cli: Cli, tmp_path: Path) -> None:
    good = next(found for info, found in OP.solutions() if info.name == "cpu_simd")
    Path("kernel.cpp").write_text(good.source)
    words = ("bundle", OP.name, "kernel.cpp", "made", "--evaluation", "verdict.json", "--json")
    for text, said in (
        (None, "verdict.json is not a verdict: [Errno 2]"),
        ("{}", "verdict.json is not a verdict: "),
        (evaluation(CANDIDATE).model_dump_json(), "a verdict on another source"),
    ):
        if text is not None:
            Path("verdict.json").write_text(text)
        code, document = cli(*words)
        assert (code, document["error"]["kind"]) == (2, "usage")
        assert said in document["error"]["message"]
    Path("verdict.json").write_text(evaluation(good, bench.Outcome.MISMATCH).model_dump_json())
    code, document = cli(*words)
    assert (code, document["outcome"]) == (1, "mismatch")
    assert not Path("made").exists()
    Path("verdict.json").write_text(evaluation(good).model_dump_json())
    code, document = cli(*words)
    assert (code, document["evidence"]["digest"]) == (0, good.digest)
    assert cli("verify", "made", "--json")[1]["id"] == document["id"]
    [timing] = evaluation().timings
    slow = {"axes": {"tokens": 64}, "speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9}
    both = {"sweep": "cpu", "timings": (timing, timing.model_copy(update=slow))}
    Path("verdict.json").write_text(evaluation(good).model_copy(update=both).model_dump_json())
    code, said = cli(*words[:-1])
    assert code == 0
    assert "the engine's own code runs at tokens above 1: it is faster there" in said


def test_verdicts_over_several_sweeps_are_one_patch(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patcher.bench import judge

    good = next(found for info, found in OP.solutions() if info.name == "cpu_simd")
    Path("kernel.cpp").write_text(good.source)
    [timing] = evaluation().timings
    slow = {"axes": {"tokens": 64}, "speedup": 0.8, "speedup_low": 0.7, "speedup_high": 0.9}
    timings = {"bf16": (timing,), "cpu": (timing, timing.model_copy(update=slow))}

    def over(sweep: str) -> bench.Evaluation:
        update = {"sweep": sweep, "timings": timings[sweep]}
        return evaluation(good).model_copy(update=update)

    for sweep in timings:
        Path(f"{sweep}.json").write_text(over(sweep).model_dump_json())
    words = ("bundle", OP.name, "kernel.cpp", "made", "--evaluation", "bf16.json", "--evaluation")
    code, document = cli(*words, "cpu.json", "--json")
    assert code == 0
    assert (document["evidence"]["sweep"], document["further"][0]["sweep"]) == ("bf16", "cpu")
    assert document["guards"]["axes"]["tokens"]["maximum"] == 1
    patch = Patch.load(Path("made"))
    assert [one.sweep for one in patch.evaluations] == ["bf16", "cpu"]
    assert "2.000x; over cpu: 2.000x" in cli("verify", "made")[1]
    code, document = cli(*words, "bf16.json", "--json")
    assert (code, document["error"]["message"]) == (2, "two verdicts are of the same sweep")
    lost = over("cpu").model_copy(
        update={"outcome": bench.Outcome.TOO_SLOW, "geomean_speedup": 0.9}
    )
    Path("cpu.json").write_text(lost.model_dump_json())
    code, document = cli(*words, "cpu.json", "--json")
    assert (code, document["guards"]["axes"]["tokens"]["maximum"]) == (0, 1), "slower as a whole"
    first = (*words[:-2], "cpu.json", "--evaluation", "bf16.json", "--json")
    assert cli(*first)[1]["outcome"] == "too_slow", "but not where it is known by that"
    Path("cpu.json").write_text(
        lost.model_copy(update={"timings": (timing.model_copy(update=slow),)}).model_dump_json()
    )
    code, document = cli(*words, "cpu.json", "--json")
    assert (code, document["outcome"]) == (1, "too_slow"), "slower everywhere"
    asked: list[str | None] = []

    def judged(candidate: bench.Candidate, settings: judge.JudgeSettings, *rest: object) -> object:
        asked.append(settings.sweep)
        return over(str(settings.sweep))

    monkeypatch.setattr(judge, "evaluate", judged)
    code, said = cli(*words[:3], "again", "--sweep", "cpu", "--sweep", "bf16")
    assert (code, asked) == (0, ["cpu", "bf16"])
    assert "over cpu: 2.000x against None; over bf16: 2.000x" in said
    manifest = json.loads(Path("made/manifest.json").read_text())
    manifest["further"][0]["digest"] = CANDIDATE.digest
    Path("made/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(bench.VerificationError, match="is damaged"):
        Patch.load(Path("made"))
