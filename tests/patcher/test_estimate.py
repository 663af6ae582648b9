"""`--dry-run` and ceilings on the command line; the estimate by arithmetic that one can follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import error_of, patcher
from model_servers import APIS, serving

from patcher.agent import MAX_TOKENS
from patcher.attempts import KnownKernel
from patcher.bench import Language, UsageError, load_op
from patcher.kernel_search.estimate import JUDGE_S, Figure, estimate
from patcher.models import PROMPT_TOKENS
from patcher.models.registry import ModelEntry
from patcher.prompting.room import CHARACTERS_PER_TOKEN
from patcher.settings import Settings
from patcher.strategies.search import Search

OP = load_op("fused_add_rms_norm")
LOCAL = ModelEntry(
    provider="openai",
    model="m",
    base_url="http://localhost:1/v1",
    input_usd_per_mtok=0.0,
    output_usd_per_mtok=1.0,
    max_output_tokens=MAX_TOKENS["generate"],
)


def settings(iterations: int, model: str = "local", entry: ModelEntry = LOCAL) -> Settings:
    return Settings(model=model, iterations=iterations, models={"local": entry}, budget_usd=3.0)


def test_one_candidate_is_one_question() -> None:
    found = estimate(OP, Language.CUDA, settings(1))
    room = MAX_TOKENS["generate"]
    assert found.calls == Figure(expected=1, worst=1)
    assert found.usd == Figure(expected=room / 4 / 1e6, worst=room / 1e6)
    assert found.gpu_minutes.expected == JUDGE_S / 60
    assert found.ceilings.usd == 3.0


def test_every_later_one_asks_for_advice_and_a_cut_reply_is_asked_for_again() -> None:
    found = estimate(OP, Language.CPP, settings(3).model_copy(update={"analyst": "local"}))
    # a candidate in 32k; twice a diagnosis in 8k and, cut off, in 16k and 32k, and a candidate
    assert found.calls == Figure(expected=5, worst=9)
    assert found.usd.worst == pytest.approx((32 + 2 * (8 + 16 + 32 + 32)) * 1000 / 1e6)
    assert found.usd.expected == pytest.approx((32 + 2 * (16 + 32)) / 4 * 1000 / 1e6)
    assert found.gpu_minutes == Figure(expected=0, worst=0)


@pytest.mark.parametrize(
    ("language", "model", "named", "analyst"),
    [
        (Language.CPP, "local", None, "off"),
        (Language.CPP, "local", "anthropic", "anthropic"),
        (Language.CPP, "replay:demo", None, "replay:demo"),
        (Language.CUDA, "local", None, "local"),
        (Language.TRITON, "local", "off", "off"),
    ],
)
def test_on_a_cpu_nobody_analyses_unless_named(
    language: Language, model: str, named: str | None, analyst: str
) -> None:
    asked = settings(3, model).model_copy(update={"analyst": named})
    assert estimate(OP, language, asked).analyst == analyst


@pytest.mark.parametrize(
    ("strategy", "width", "calls"),
    [
        ("refine", None, 1 + 5 * 2),
        ("single", None, 1),
        ("sample", 4, 6),
        ("beam", 4, 4 + 2 * 2),
        ("evolve", 9, 6),
        ("translate", None, 1 + 5 * 2),
    ],
)
def test_a_strategy_decides_how_many_questions_there_are(
    strategy: str, width: int | None, calls: int
) -> None:
    search = Search(strategy=strategy, width=width)
    found = estimate(OP, Language.CPP, settings(6), search=search)
    assert found.calls.expected == calls
    assert found.iterations == (1 if strategy == "single" else 6)


def test_the_worst_prompt_fills_the_room_that_the_settings_give() -> None:
    wide = settings(1).model_copy(update={"prompt_tokens": 2 * PROMPT_TOKENS})
    worst = [estimate(OP, Language.CPP, each).tokens.worst or 0 for each in (settings(1), wide)]
    assert worst[1] - worst[0] >= PROMPT_TOKENS


def test_a_kernel_to_begin_from_is_in_every_prompt() -> None:
    def tokens(search: Search) -> float:
        expected = estimate(OP, Language.CPP, settings(2), search=search).tokens.expected
        assert expected
        return expected

    source = "int answer = 42;\n" * 200
    kernel = KnownKernel(name="known", language=Language.CUDA, source=source)
    translated = Search(strategy="translate", known_kernels=(kernel,))
    plain = tokens(Search(strategy="translate"))
    assert tokens(translated) > plain + len(source) / CHARACTERS_PER_TOKEN


def test_what_is_not_known_is_not_guessed() -> None:
    unknown = LOCAL.model_copy(update={"input_usd_per_mtok": None, "output_usd_per_mtok": None})
    found = estimate(OP, Language.CPP, settings(2, entry=unknown))
    assert found.usd == Figure(expected=None, worst=None)
    assert found.tokens.expected is not None
    by_files = estimate(OP, Language.CPP, settings(2, model="exchange:letters"))
    assert by_files.tokens == Figure(expected=None, worst=None)
    assert by_files.usd == Figure(expected=0, worst=0)
    dear = settings(2).model_copy(update={"diagnoser": "anthropic:claude-opus-5"})
    cheap = estimate(OP, Language.CPP, settings(2)).usd.worst or 0.0
    assert (estimate(OP, Language.CPP, dear).usd.worst or 0.0) > 10 * cheap
    with pytest.raises(UsageError, match="unknown model"):
        estimate(OP, Language.CPP, settings(2, model="oracle"))


def test_a_dry_run_asks_nobody_and_leaves_no_run(tmp_path: Path) -> None:
    with serving() as server:
        env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "sk-honeytoken"}
        words = ["optimize", OP.name, "--dry-run", "--model", "anthropic", "--json"]
        result = patcher(*words, "--budget-minutes", "5", cwd=tmp_path, env=env)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["ceilings"]["minutes"] == 5.0
        assert found["usd"]["expected"] < found["usd"]["worst"]
        assert not server.seen
    assert not list(tmp_path.iterdir())


def test_models_are_listed_and_no_key_is_shown(tmp_path: Path) -> None:
    (tmp_path / "patcher.toml").write_text(
        '[models.lab]\nprovider = "openai"\nmodel = "m"\nkey_variable = "LAB_KEY"\n'
    )
    env = {"LAB_KEY": "sk-honeytoken", "ANTHROPIC_API_KEY": ""}
    result = patcher("models", "--json", cwd=tmp_path, env=env)
    rows = {row["name"]: row for row in json.loads(result.stdout)["language_models"]}
    assert (rows["lab"]["has_key"], rows["anthropic"]["has_key"]) == (True, False)
    shown = patcher("models", cwd=tmp_path, env=env).stdout
    assert "LAB_KEY: yes" in shown
    for output in (result.stdout, shown, patcher("doctor", cwd=tmp_path, env=env).stdout):
        assert "honeytoken" not in output


@pytest.mark.slow
def test_a_run_at_its_ceiling_goes_on_with_a_higher_one(tmp_path: Path) -> None:
    """No ceiling, no question: exit code 4; then the server is asked, which refuses the key."""
    anthropic = APIS["anthropic"]
    with serving() as server:
        server.script = [anthropic.failure(401, "authentication_error")]
        env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "sk-honeytoken"}
        first = patcher(
            *("optimize", OP.name, "--model", "anthropic", "--budget-tokens", "10", "--json"),
            cwd=tmp_path,
            env=env,
        )
        assert (first.returncode, server.seen) == (4, [])
        assert "patcher resume --budget-tokens" in error_of(first)["hint"]
        more = ("resume", "latest", "--budget-tokens", "1000000", "--json")
        again = patcher(*more, cwd=tmp_path, env=env)
        assert (again.returncode, len(server.seen)) == (3, 1)
        assert "honeytoken" not in first.stdout + first.stderr + again.stdout + again.stderr
