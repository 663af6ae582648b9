"""Settings: who wins, and where a value came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.bench import UsageError
from patcher.settings import NAMES, resolve


def test_defaults_have_an_origin(tmp_path: Path) -> None:
    found = resolve(environ={}, folder=tmp_path)
    assert found.model == "anthropic"
    assert found.budget_usd is None
    assert found.origins == dict.fromkeys(NAMES, "default")


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    (tmp_path / "patcher.toml").write_text(
        'model = "exchange:file"\niterations = 2\nmargin_pct = 1\nbudget_usd = 3.5\n'
    )
    environ = {
        "PATCHER_MODEL": "exchange:variable",
        "PATCHER_ITERATIONS": "3",
        "PATCHER_ANALYST": "",
    }
    flags = {"model": "replay:flag", "iterations": None, "runs_dir": Path("elsewhere")}
    found = resolve(flags, environ=environ, folder=tmp_path)
    assert (found.model, found.iterations, found.margin_pct) == ("replay:flag", 3, 1.0)
    assert (found.budget_usd, found.runs_dir, found.analyst) == (3.5, Path("elsewhere"), None)
    assert found.origins == dict.fromkeys(NAMES, "default") | {
        "model": "flag --model",
        "iterations": "PATCHER_ITERATIONS",
        "budget_usd": "patcher.toml",
        "runs_dir": "flag --runs-dir",
        "margin_pct": "patcher.toml",
    }
    recorded = found.for_run()
    assert set(recorded) == set(NAMES) - {"runs_dir", "models"}
    assert (
        recorded.items()
        >= {
            "model": "replay:flag",
            "analyst": None,
            "iterations": 3,
            "budget_usd": 3.5,
            "margin_pct": 1.0,
        }.items()
    )
    assert recorded["tripwires"] == {"banned": [], "required": [], "ignore": [], "ops": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", "many"),
        ("iterations", "0"),
        ("budget_usd", "-1"),
        ("budget_usd", "inf"),
        ("margin_pct", "nan"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(tmp_path: Path, name: str, value: str) -> None:
    variable = f"PATCHER_{name.upper()}"
    with pytest.raises(UsageError, match=f"{name} = '{value}' \\({variable}\\)"):
        resolve(environ={variable: value}, folder=tmp_path)


@pytest.mark.parametrize("content", [b"model =", b"\xff", b"modle = 'x'\n", b"iterations = 'x'\n"])
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "patcher.toml").write_bytes(content)
    with pytest.raises(UsageError, match=r"patcher\.toml") as caught:
        resolve(environ={}, folder=tmp_path)
    assert "\n" not in caught.value.hint


def test_a_file_in_the_place_of_the_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, where runs need a folder"):
        resolve(environ={"PATCHER_RUNS_DIR": str(tmp_path / "file/runs")}, folder=tmp_path)


def test_values_nested_too_deeply_are_one_short_error(tmp_path: Path) -> None:
    deep = "[" * 50_000
    for name in ("models", "score", "tripwires"):
        with pytest.raises(UsageError, match="nested too deeply") as caught:
            resolve(environ={f"PATCHER_{name.upper()}": deep}, folder=tmp_path)
        assert len(caught.value.message) < 400
    (tmp_path / "patcher.toml").write_text(f"models = {deep}")
    with pytest.raises(UsageError, match="nested too deeply"):
        resolve(environ={}, folder=tmp_path)


def test_an_unknown_flag_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="modle"):
        resolve({"modle": "x"}, environ={}, folder=tmp_path)


LOCAL = """
[models.local]
provider = "openai"
model = "qwen"
base_url = "http://localhost:8000/v1"
key_variable = "LOCAL_KEY"
input_usd_per_mtok = 0.1
output_usd_per_mtok = 0.4
"""


def test_models_of_ones_own_stay_out_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "patcher.toml").write_text(LOCAL)
    found = resolve(environ={}, folder=tmp_path)
    price = found.models["local"].price
    assert price is not None
    assert price.cost_usd(1_000_000, 1_000_000) == 0.5
    assert "models" not in found.for_run()  # servers are this machine's business


@pytest.mark.parametrize(
    "entry",
    [
        'key_variable = "sk-honeytoken"',
        'api_key = "sk-honeytoken"',
        'base_url = "http://user:sk-honeytoken@host/v1"',
        'base_url = "http://host/v1?key=sk-honeytoken"',
        'base_url = "sk-honeytoken:8000"',
        "input_usd_per_mtok = 1",
        'provider = "oracle"',
    ],
)
def test_a_wrong_entry_is_named_and_never_shown(tmp_path: Path, entry: str) -> None:
    lines = {"provider": 'provider = "openai"', "model": 'model = "m"'}
    lines[entry.split()[0]] = entry
    (tmp_path / "patcher.toml").write_text("\n".join(["[models.mine]", *lines.values()]))
    with pytest.raises(UsageError, match=r"models\.mine") as caught:
        resolve(environ={}, folder=tmp_path)
    assert "honeytoken" not in caught.value.message + caught.value.hint
    assert caught.value.__cause__ is None  # pydantic's error shows the values


@pytest.mark.parametrize("name", ["openai", "a:b", "a b"])
def test_an_entry_has_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / "patcher.toml").write_text(LOCAL.replace("models.local", f'models."{name}"'))
    with pytest.raises(UsageError, match="models"):
        resolve(environ={}, folder=tmp_path)
