"""Models by files, recordings and names, prices, and the purse of a run."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from model_servers import Slept

from patcher.bench import BudgetError, MissingError, UsageError, VerificationError, WaitingError
from patcher.models import ModelCall, ModelError, Reply, Request, Usage, open_model
from patcher.models.budget import Budget
from patcher.models.ceilings import SpendingLimits
from patcher.models.client import ModelClient
from patcher.models.exchange import ExchangeModel
from patcher.models.prices import OLD_DAYS, old_prices, price, prices
from patcher.models.registry import ModelEntry, list_models
from patcher.models.replay import ReplayModel, export_recording, read_recording
from patcher.runs.run import Run


def question(step: str = "op/0/ask-generate", prompt: str = "Write it.") -> Request:
    return Request(step=step, role="generate", system="You write.", prompt=prompt, max_tokens=1000)


def answer(request: Request, text: str = "done", cost: float | None = None) -> Reply:
    return Reply(
        text=text,
        model="some-model",
        usage=Usage(input_tokens=10, output_tokens=20, cost_usd=cost),
        stop_reason="end_turn",
        source="api",
        prompt_digest=request.digest,
    )


def test_open_model_by_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(MissingError, match="key") as caught:
        open_model("anthropic", tmp_path)
    assert "ANTHROPIC_API_KEY" in caught.value.hint
    assert isinstance(open_model("exchange", tmp_path), ExchangeModel)
    for spec in ("", "gpt", "openai", "openai:", "replay", "replay:", "exchanges:x"):
        with pytest.raises(UsageError):
            open_model(spec, tmp_path)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-test")
    assert open_model("anthropic", tmp_path).name == prices().default
    assert open_model("anthropic:claude-haiku-4-5", tmp_path).name == "claude-haiku-4-5"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(MissingError, match="OPENAI_API_KEY"):
        open_model("openai:gpt-5.4", tmp_path)


def test_what_can_be_asked_is_listed_and_of_keys_only_that_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.setenv("LAB_KEY", "sk-honeytoken")
    registry = {
        "lab": ModelEntry(provider="openai", model="gpt-5.4", key_variable="LAB_KEY"),
        "local": ModelEntry(
            provider="openai",
            model="qwen",
            base_url="http://localhost:8000/v1",
            input_usd_per_mtok=0.0,
            output_usd_per_mtok=0.0,
        ),
    }
    rows = {row.name: row for row in list_models(registry)}
    assert [(name, row.has_key) for name, row in rows.items()] == [
        ("anthropic", False),
        ("lab", True),
        ("local", None),
    ]
    assert (rows["lab"].input_usd_per_mtok, rows["local"].input_usd_per_mtok) == (2.5, 0.0)
    assert (rows["lab"].images, rows["local"].images) == (True, False)
    assert "honeytoken" not in str(rows)


def test_usage_adds_up_and_keeps_what_is_unknown_unknown() -> None:
    known = Usage(input_tokens=1, output_tokens=2, cost_usd=0.5)
    assert known + known == Usage(input_tokens=2, output_tokens=4, cost_usd=1.0)
    assert known + Usage() == known
    assert Usage() + Usage() == Usage()


class TestExchange:
    def test_waits_until_the_reply_is_there(self, tmp_path: Path) -> None:
        folder = tmp_path / "letters"
        with pytest.raises(WaitingError) as caught:
            ExchangeModel(folder).ask(question())
        prompt = folder / "001-op-0-ask-generate.prompt.md"
        reply = folder / "001-op-0-ask-generate.reply.md"
        assert str(reply) in caught.value.hint
        assert caught.value.exit_code == 6
        assert "You write." in prompt.read_text()
        assert "Write it." in prompt.read_text()
        reply.write_text(" \n")  # begun, not finished
        with pytest.raises(WaitingError):
            ExchangeModel(folder).ask(question())
        reply.write_text("the answer\n")
        got = ExchangeModel(folder).ask(question())
        assert (got.text, got.source, got.usage) == ("the answer\n", "exchange", Usage())
        assert len(list(folder.iterdir())) == 2

    def test_another_question_is_another_file(self, tmp_path: Path) -> None:
        model = ExchangeModel(tmp_path)
        for prompt in ("first", "second\r\n", "first", "second\r\n"):
            with pytest.raises(WaitingError):
                model.ask(question(prompt=prompt))
        with pytest.raises(WaitingError):
            model.ask(question("op/1/ask-generate"))
        assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["001-", "002-", "003-"]

    def test_unusable_folders_and_replies(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError):
            ExchangeModel(tmp_path / "file").ask(question())
        with pytest.raises(WaitingError):
            ExchangeModel(tmp_path).ask(question())
        (tmp_path / "001-op-0-ask-generate.reply.md").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UsageError, match="UTF-8"):
            ExchangeModel(tmp_path).ask(question())

    def test_a_mark_of_byte_order_is_no_text(self, tmp_path: Path) -> None:
        """Editors write it; before a fence it would hide the source."""
        with pytest.raises(WaitingError):
            ExchangeModel(tmp_path).ask(question())
        [prompt] = tmp_path.glob("*.prompt.md")
        reply = prompt.with_name(prompt.name.replace(".prompt.", ".reply."))
        reply.write_text("```cpp\nint x;\n```\n", encoding="utf-8-sig")
        assert ExchangeModel(tmp_path).ask(question()).text.startswith("```cpp")
        reply.write_text("", encoding="utf-8-sig")
        with pytest.raises(WaitingError):
            ExchangeModel(tmp_path).ask(question())

    def test_a_reply_is_cleaned_and_bounded(self, tmp_path: Path) -> None:
        with pytest.raises(WaitingError):
            ExchangeModel(tmp_path).ask(question())
        reply = tmp_path / "001-op-0-ask-generate.reply.md"
        reply.write_bytes("a\x1b[2J\0\u202eb\r\n".encode())
        got = ExchangeModel(tmp_path).ask(question())
        assert (got.text, got.stop_reason) == ("a<U+001B>[2J<U+0000><U+202E>b\n", "end_turn")
        with reply.open("wb") as file:
            file.truncate(1 << 33)  # of zeros, without room on the disk
        got = ExchangeModel(tmp_path).ask(question())
        assert got.stop_reason == "too_long"


class Scripted:
    """A double for a paid model: answers, or raises what it is given; counts its calls."""

    def __init__(self, *script: Reply | Exception, worst: float | None = 0.4) -> None:
        self.name = "scripted"
        self.script = list(script)
        self.worst = worst
        self.calls = 0

    def worst_cost_usd(self, request: Request) -> float | None:
        return self.worst

    def ask(self, request: Request) -> Reply:
        self.calls += 1
        found = self.script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class TestReplay:
    def test_a_run_becomes_a_recording_that_replays(self, tmp_path: Path) -> None:
        first, second = question("op/0/ask-generate"), question("op/1/ask-generate", "\u2028é")
        with Run.create(tmp_path, command="optimize") as run:
            model = Scripted(answer(first, "one", 0.1), answer(second, "two\u2028\r\n", 0.1))
            client = ModelClient(Budget(run))
            client.ask(model, first)
            client.ask(model, second)
            run.step("op/0/other", lambda: Usage(), Usage)
        file = tmp_path / "recording.jsonl"
        assert export_recording(run.path, file) == 2
        assert [line.prompt for line in read_recording(file)] == ["Write it.", "\u2028é"]
        replayed = ReplayModel(file)
        got = replayed.ask(second)
        assert (got.text, got.source, got.model) == ("two<U+2028>\n", "recorded", "some-model")
        assert got.usage == Usage(input_tokens=10, output_tokens=20)  # paid then, not now
        changed = question("op/0/ask-generate", "other timings")
        assert replayed.ask(changed).text == "one"
        assert replayed.ask(changed).prompt_digest != changed.digest
        with pytest.raises(BudgetError, match="no reply for op/2") as caught:
            replayed.ask(question("op/2/ask-generate"))
        assert caught.value.hint

    def test_a_changed_reply_is_not_exported(self, tmp_path: Path) -> None:
        with Run.create(tmp_path, command="optimize") as run:
            client = ModelClient(Budget(run))
            client.ask(Scripted(answer(question(), "honest")), question())
        artefact = run.path / "steps/op/0/ask-generate.json"
        artefact.write_text(artefact.read_text().replace("honest", "forged"))
        with pytest.raises(VerificationError):
            export_recording(run.path, tmp_path / "recording.jsonl")

    def test_what_a_recording_says_is_cleaned(self, tmp_path: Path) -> None:
        said = answer(question(), "\x1b[2J").model_copy(update={"model": "m\u202e\n" * 99})
        with Run.create(tmp_path, command="optimize") as run:
            ModelClient(Budget(run)).ask(Scripted(said), question())
        file = tmp_path / "recording.jsonl"
        export_recording(run.path, file)
        got = ReplayModel(file).ask(question())
        assert got.text == "<U+001B>[2J"
        assert got.model.startswith("m<U+202E> m")
        assert len(got.model) <= 120
        file.write_text(file.read_text().replace('"output_tokens":20', '"output_tokens":-900000'))
        with pytest.raises(UsageError, match="no recorded reply"):
            ReplayModel(file)

    @pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\xff\xfe", b"not json\n"])
    def test_unreadable_recordings(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "recording.jsonl"
        file.write_bytes(content)
        with pytest.raises(UsageError):
            ReplayModel(file)
        with pytest.raises(UsageError):
            ReplayModel(tmp_path / "none.jsonl")


class TestPrices:
    def test_the_default_model_has_a_price(self) -> None:
        assert price(prices().default) is not None
        assert price("no-such-model") is None
        assert price("claude-haiku-4-5-20251001") == price("claude-haiku-4-5")

    def test_old_prices_are_told(self) -> None:
        looked_at = prices().looked_at
        assert old_prices(looked_at + timedelta(days=OLD_DAYS)) is None
        warned = old_prices(looked_at + timedelta(days=OLD_DAYS + 1)) or ""
        assert str(looked_at) in warned
        assert "91 days" in warned

    def test_cost_in_bands(self) -> None:
        haiku = price("claude-haiku-5-5")
        assert haiku is not None
        assert haiku.cost_usd(100_000, 1_000_000) == pytest.approx(0.01 + 0.5)
        assert haiku.cost_usd(200_000, 1_000_000) == pytest.approx(0.1 + 2.5)


class TestBudget:
    def test_stops_before_the_call_that_could_cross_it_and_goes_on_with_more(
        self, tmp_path: Path
    ) -> None:
        model = Scripted(*(answer(question(), cost=0.3) for _ in range(3)))
        with Run.create(tmp_path, command="optimize", settings={"budget_usd": 0.75}) as run:
            client = ModelClient(Budget(run))
            client.ask(model, question("a"))
            client.ask(model, question("b"))
            with pytest.raises(BudgetError, match=r"\$0\.60 of the budget of \$0\.75") as caught:
                client.ask(model, question("c"))
            assert (model.calls, caught.value.exit_code) == (2, 4)
            assert "patcher resume --budget-usd 1.4" in caught.value.hint
            nothing = ModelClient(Budget(run, SpendingLimits(usd=0.0)))
            assert nothing.ask(model, question("a")).reply.text == "done"  # paid already
        with Run.open(run.path) as again:
            SpendingLimits(usd=1.0).note_in(again)
            budget = Budget(again)
            ModelClient(budget).ask(model, question("c"))
            assert budget.account.committed_usd == pytest.approx(0.9)

    def test_a_failed_call_costs_nothing_unless_it_may_have_been_billed(
        self, tmp_path: Path
    ) -> None:
        slept = Slept()
        model = Scripted(
            ModelError("busy"), ModelError("broke off", charged=True), answer(question(), cost=0.1)
        )
        with Run.create(tmp_path, command="optimize") as run:
            budget = Budget(run, SpendingLimits(usd=1.0))
            ModelClient(budget, clock=slept.clock).ask(model, question())
            notes = [event.data for event in run.events if "spent_usd" in event.data]
            assert [note["spent_usd"] for note in notes if "trouble" in note] == [0.0, 0.4]
            assert budget.account.spent_usd == pytest.approx(0.5)
            assert budget.account.reserved == {}
        assert len(slept.pauses) == 2

    def test_no_price_no_ceiling(self, tmp_path: Path) -> None:
        model = Scripted(answer(question()), worst=None)
        with Run.create(tmp_path, command="optimize") as run:
            with pytest.raises(UsageError, match="no price"):
                ModelClient(Budget(run, SpendingLimits(usd=1.0))).ask(model, question())
            assert model.calls == 0
            assert isinstance(ModelClient(Budget(run)).ask(model, question()), ModelCall)


def test_records_carry_a_schema_version(tmp_path: Path) -> None:
    with Run.create(tmp_path, command="optimize") as run:
        ModelClient(Budget(run)).ask(Scripted(answer(question())), question())
    export_recording(run.path, tmp_path / "recording.jsonl")
    for text in (
        (run.path / "steps/op/0/ask-generate.json").read_text(),
        (tmp_path / "recording.jsonl").read_text(),
        (run.path / "run.json").read_text(),
    ):
        assert json.loads(text)["schema_version"] == 1
