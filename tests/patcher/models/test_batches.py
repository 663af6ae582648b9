"""Questions in batches, through both real SDKs against local servers that speak their protocols."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_asking import Asking, model_of, request
from batch_servers import MODELS, TOKENS, Batch, BatchServer, all_answered, batch_server
from model_servers import KEY
from tried_sample import OP, judged

from patcher.agent import run_loop
from patcher.bench import BudgetError, Candidate, Evaluation, Language, UsageError, WaitingError
from patcher.bench import load_op as open_op
from patcher.models import ModelError, Reply, Request
from patcher.models.batch_questions import sent_questions
from patcher.models.budget import Budget
from patcher.models.ceilings import SpendingLimits
from patcher.models.client import ModelClient
from patcher.models.prices import price
from patcher.models.registry import ModelEntry
from patcher.models.retry import Clock
from patcher.runs.run import Run
from patcher.status import status as status_of
from patcher.strategies import open_strategy


@pytest.fixture(params=list(MODELS))
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BatchServer]:
    monkeypatch.setenv("PATCHER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with batch_server() as found:
        for name, path in (("ANTHROPIC", ""), ("OPENAI", "/v1")):
            monkeypatch.setenv(f"{name}_API_KEY", KEY)
            monkeypatch.setenv(f"{name}_BASE_URL", found.url + path)
        yield found


def half(api: str) -> float:
    """What one reply of the double costs in a batch."""
    known = price(MODELS[api])
    assert known is not None
    return known.cost_usd(*TOKENS) / 2


class TestABatch:
    def test_goes_out_once_and_is_booked_at_half_the_price(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        asking = Asking(run, api)
        assert asking("a", "b") == [None, None]
        [batch] = server.batches
        assert [batch.question(each) for each in batch.asked] == ["Write a.", "Write b."]
        assert all("stream" not in each for each in batch.asked.values())
        worst = asking.model.worst_cost_usd(request("a"))
        assert asking.account.set_aside.usd == pytest.approx(2 * (worst or 0))
        assert asking.account.spent_usd == 0
        assert "2 questions went to" in asking.said[0]

        later = Asking(run, api)  # another process, before it has ended
        assert later("a", "b") == [None, None]
        assert (len(server.batches), server.looks) == (1, 1)

        server.end()
        last = Asking(run, api)
        replies = last("a", "b")
        assert [each.text for each in replies if each] == ["to Write a.", "to Write b."]
        assert len(server.batches) == 1
        assert last.account.reserved == {}
        assert last.account.used.usd == pytest.approx(2 * half(api))
        assert last.account.unknown.usd == 0
        ledger = last.account.ledger
        assert ledger.price_sources == ("list price of batches",)
        assert "list price of batches" in ledger.details()
        assert any("answer no question" in line for line in last.said)
        assert not any("elsewhere" in path for path in server.paths)
        assert last("a", "b") == replies  # stored: nobody is asked

    def test_is_waited_for_as_long_as_its_entry_says(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        asking = Asking(run, api)
        asking.model = model_of(api, run, batch_wait_minutes=1.25)
        asking("a")
        assert asking.slept.pauses == [30, 30, 15]
        with pytest.raises(WaitingError, match="its batch batch_0 is not done") as waits:
            asking.client.ask(asking.model, request("a"))
        assert "patcher resume" in waits.value.hint
        server.end()
        assert asking.client.answered()
        assert asking("a") != [None]

    def test_is_not_begun_over_a_ceiling(self, api: str, server: BatchServer, run: Run) -> None:
        worst = model_of(api, run).worst_cost_usd(request())
        asking = Asking(run, api, SpendingLimits(usd=1.5 * (worst or 0)))
        with pytest.raises(BudgetError):
            asking("a", "b")
        assert not server.batches
        assert asking("a") == [None]  # what was reserved and not sent is sent once
        asking = Asking(run, api, SpendingLimits(usd=1.5 * (worst or 0)))
        server.end()
        assert asking("a") != [None]
        assert len(server.batches) == 1

    def test_takes_the_sampling_of_its_entry_along(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        asking = Asking(run, api)
        asking.model = model_of(api, run, sampling={"temperature": 0.5})
        asking("a")
        [asked] = server.batches[0].asked.values()
        assert asked["temperature"] == 0.5

    def test_has_the_prices_of_its_entry_as_they_are(self) -> None:
        own = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
        entry = ModelEntry.model_validate(
            {"provider": "openai", "model": "gpt-5.5", "batch": True, **own}
        )
        assert entry.price is not None
        assert (entry.price.input, entry.price_source) == (1.0, "patcher.toml")
        listed = ModelEntry(provider="openai", model="gpt-5.5", batch=True).price
        assert listed is not None
        assert (listed.input, listed.output, listed.long_output) == (2.5, 15.0, 22.5)


_KILLED = """
import sys
from pathlib import Path
from batch_asking import Asking
from patcher.runs.run import Run
Asking(Run.open(Path(sys.argv[1])), sys.argv[2])("a", "b")
"""


class TestAKill:
    @pytest.mark.parametrize("beside", [0, 1])
    def test_between_the_batch_and_its_name_pays_once(
        self, api: str, server: BatchServer, run: Run, beside: int
    ) -> None:
        run.close()
        for number in range(beside):  # of another run with the same account
            server.batches.append(Batch(api, f"other_{number}", {f"x-{n}": {} for n in (0, 1)}))
            server.lines = lambda batch: b"" if batch.name[0] == "o" else all_answered(batch)
        folder = str(Path(__file__).parents[2] / "support")
        code = f"import sys; sys.path.insert(0, {folder!r})\n{_KILLED}"
        process = subprocess.Popen([sys.executable, "-P", "-c", code, str(run.path), api])
        server.kills = process.pid
        assert process.wait(120) == -9
        server.kills = None
        assert len(server.batches) == 1 + beside

        with Run.open(run.path) as again:
            if api == "anthropic":  # its batches have no name of ours: the results say it
                with pytest.raises(WaitingError, match="will be known when"):
                    Asking(again, api).client.ask(model_of(api, again), request("a"))
            server.end()
            asking = Asking(again, api)
            assert None not in asking("a", "b")
            assert len(server.batches) == 1 + beside
            assert asking.account.used.usd == pytest.approx(2 * half(api))
            assert asking.account.unknown.usd == 0

    def test_before_the_batch_pays_nothing(self, api: str, server: BatchServer, run: Run) -> None:
        asking = Asking(run, api)
        for step in ("a", "b"):
            with pytest.raises(WaitingError):
                asking.client.ask(asking.model, request(step))
        assert asking.account.set_aside.usd > 0
        assert Asking(run, api)("a", "b") == [None, None]  # nothing was sent: sent now
        [batch] = server.batches
        assert len(batch.asked) == 2
        server.end()
        asking = Asking(run, api)
        assert None not in asking("a", "b")
        assert asking.account.unknown.usd == 0

    def test_in_the_midst_of_sending_what_never_came_sends_it_again(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        server.refusals = [(502, {}), (502, {})]
        with pytest.raises(ModelError):
            Asking(run, api)("a")
        asking = Asking(run, api)
        assert asking.account.set_aside.usd > 0  # it may have been taken
        server.refusals = []
        assert asking("a") == [None]  # it was not
        server.end()
        assert asking("a") == [None]  # known as under way in this process
        asking = Asking(run, api)
        assert asking("a") != [None]
        assert asking.account.unknown.usd == 0
        assert len(server.batches) == 1

    @pytest.mark.parametrize("data", [None, 5, "b", {"b": {}}])
    def test_a_list_that_is_none_never_says_that_nothing_was_sent(
        self, api: str, server: BatchServer, run: Run, data: object
    ) -> None:
        server.refusals = [(502, {}), (502, {})]
        with pytest.raises(ModelError):
            Asking(run, api)("a")
        server.refusals, server.listing = [], {"data": data}
        asking = Asking(run, api)
        with pytest.raises(ModelError, match="list of batches"):
            asking("a")
        assert asking.account.set_aside.usd > 0
        assert server.batches == []


def one_by_one(**first: Any) -> Any:
    """Results of which the first question has no reply."""

    def lines(batch: Batch) -> bytes:
        found = [batch.answer(each) for each in batch.asked]
        found[0] = batch.answer(next(iter(batch.asked)), **first)
        return "".join(json.dumps(line) + "\n" for line in found).encode()

    return lines


class TestWhatComesBack:
    @pytest.mark.parametrize(
        "first",
        [{"expired": True}, {"error": ("overloaded_error", "busy"), "status": 503}],
        ids=["expired", "overloaded"],
    )
    def test_without_a_reply_goes_into_the_next_batch(
        self, api: str, server: BatchServer, run: Run, first: dict[str, Any]
    ) -> None:
        Asking(run, api)("a", "b")
        server.end()
        server.lines = one_by_one(**first)
        asking = Asking(run, api)
        one, two = asking("a", "b")
        assert one is None
        assert two is not None
        assert [len(batch.asked) for batch in server.batches] == [2, 1]
        server.end()
        server.lines = all_answered
        asking = Asking(run, api)
        assert None not in asking("a", "b")
        assert asking.account.used.usd == pytest.approx(2 * half(api))
        assert asking.account.unknown.usd == 0

    def test_expired_thrice_stops(self, api: str, server: BatchServer, run: Run) -> None:
        server.lines = one_by_one(expired=True)
        for _ in range(3):
            assert Asking(run, api)("a") == [None]
            server.end()
        with pytest.raises(ModelError, match="expired"):
            Asking(run, api)("a")
        assert Asking(run, api).account.committed_usd == 0

    def test_cancelled_or_refused_stops_and_costs_nothing(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        for step, first, said in (
            ("a", {"canceled": True}, "was cancelled"),
            ("b", {"error": ("invalid_request_error", "no \u202esuch"), "status": 400}, "no <U"),
        ):
            Asking(run, api)(step)
            server.end()
            server.lines = one_by_one(**first)
            with pytest.raises(UsageError, match=said):
                Asking(run, api)(step)
            assert Asking(run, api).account.committed_usd == 0

    def test_without_a_line_of_its_own_is_booked_as_unknown_and_asked_again(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        asking = Asking(run, api)
        asking("a", "b")
        worst = asking.model.worst_cost_usd(request("a"))
        server.end()
        huge = b'{"custom_id": "' + b"x" * (5 << 20) + b'"}\n'
        server.lines = lambda batch: huge + b"\xff{\n" + one_by_one()(batch).splitlines()[-1]
        one, two = Asking(run, api)("a", "b")
        assert one is None
        assert two is not None
        assert Asking(run, api).account.unknown.usd == pytest.approx(worst)
        assert len(server.batches) == 2

    def test_cut_off_is_read_again_and_not_paid_again(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        Asking(run, api)("a", "b")
        server.end()
        server.lines = lambda batch: one_by_one()(batch)[:-20]
        asking = Asking(run, api)
        one = asking.client.ask(asking.model, request("a")).reply  # its line is whole
        assert one.text == "to Write a."
        with pytest.raises(ModelError, match="broke off"):
            asking.client.ask(asking.model, request("b"))
        server.lines = all_answered
        asking = Asking(run, api)
        assert None not in asking("a", "b")
        assert len(server.batches) == 1
        assert asking.account.used.usd == pytest.approx(2 * half(api))

    def test_a_named_limit_is_kept_to_in_the_next_batch(
        self, server: BatchServer, run: Run
    ) -> None:
        Asking(run, "anthropic")("a")
        server.end()
        said = "max_tokens: 4000 > 1024, which is the maximum allowed number of output tokens"
        server.lines = one_by_one(error=("invalid_request_error", said))
        asking = Asking(run, "anthropic")
        assert asking("a") == [None]
        [asked] = server.batches[1].asked.values()
        assert asked["max_tokens"] == 1024

    def test_a_whole_batch_that_is_refused(self, server: BatchServer, run: Run) -> None:
        Asking(run, "openai")("a")
        server.end("failed")
        with pytest.raises(UsageError, match="no such model"):
            Asking(run, "openai")("a")
        assert Asking(run, "openai").account.committed_usd == 0


class TestAServerWithout:
    def test_batches_is_told_in_a_sentence(self, api: str, server: BatchServer, run: Run) -> None:
        server.refusals = [(404, {"error": {"message": "nope"}})]
        with pytest.raises(UsageError, match="no batches at all: nope") as told:
            Asking(run, api)("a")
        assert "drop batch" in told.value.hint
        assert Asking(run, api).account.committed_usd == 0

    def test_patience_is_left_alone_for_a_while(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        server.refusals = [(429, {"error": {"type": "rate_limit_error", "message": "slow"}})]
        asking = Asking(run, api)
        assert asking("a") == [None]
        assert len(asking.slept.pauses) == 1
        assert len(server.batches) == 1

    def test_a_name_for_its_batch_is_not_believed(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        server.refusals = [(200, {"id": "../../x?y"})]
        with pytest.raises(ModelError, match="names no batch"):
            Asking(run, api)("a")


class TestAWait:
    @pytest.mark.parametrize("status", ["", "failed"])
    def test_what_failed_alike_is_asked_again_by_one_resume(
        self, api: str, server: BatchServer, run: Run, status: str
    ) -> None:
        Asking(run, api)("a", "b", "c")
        server.end(status if api == "openai" else "")
        server.lines = lambda batch: b"\n".join(
            json.dumps(batch.answer(each, canceled=True)).encode() for each in batch.asked
        )
        with pytest.raises(UsageError):
            Asking(run, api)("a", "b", "c")
        assert Asking(run, api).account.committed_usd == 0
        assert Asking(run, api)("a", "b", "c") == [None, None, None]
        assert len(server.batches[1].asked) == 3

    def test_for_what_its_server_forgot_ends_once_batch_is_dropped(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        Asking(run, api)("a")
        server.batches.clear()
        with pytest.raises(UsageError, match="no such batch"):
            Asking(run, api)("a")
        asking = Asking(run, api)
        asking.model = model_of(api, run, batch=False)
        with pytest.raises(ModelError):  # the double takes nothing but batches
            asking("a")
        assert "its batch is given up" in asking.said[0]
        assert asking.account.unknown.usd > 0
        assert not asking.account.reserved

    def test_outlasts_a_server_that_is_down(self, api: str, server: BatchServer, run: Run) -> None:
        asking = Asking(run, api)
        asking.model = model_of(api, run, batch_wait_minutes=3)
        server.faults = [(503, {})] * 7
        asking("a")
        assert asking.slept.pauses.count(30) == 6
        assert server.looks == 5

    def test_counts_pauses_as_time(self, api: str, server: BatchServer, run: Run) -> None:
        server.refusals = [(429, {})] * 5
        asking = Asking(run, api, SpendingLimits(minutes=0.6))
        with pytest.raises(BudgetError):
            asking("a")
        assert len(server.refusals) > 2

    def test_is_told_by_the_status(self, api: str, server: BatchServer, run: Run) -> None:
        Asking(run, api)("a", "b")
        said = f"waiting for 2 questions to {MODELS[api]} in the batch batch_0, sent 20"
        assert said in status_of(run).sentence()

    def test_names_no_key(self, api: str, server: BatchServer, run: Run) -> None:
        server.refusals = [(200, {"id": f"batch_{KEY}"})]
        with pytest.raises(ModelError, match="but the key"):
            Asking(run, api)("a")

    def test_pays_once_for_a_batch_that_shows_up_late(
        self, api: str, server: BatchServer, run: Run
    ) -> None:
        server.refusals = [(500, {})]  # it may have been taken
        with pytest.raises(ModelError):
            Asking(run, api)("a")
        [sent] = sent_questions(run.events).values()
        late = {sent.custom_id: {"messages": [{"content": "Write a."}]}}

        def sleep(seconds: float) -> None:
            server.batches.append(Batch(api, "late", late, {"patcher": sent.tag}))
            server.end()

        asking = Asking(run, api)
        asking.client = ModelClient(asking.budget, clock=Clock(sleep=sleep))
        assert asking("a") != [None]
        assert [batch.name for batch in server.batches] == ["late"]

    def test_for_a_file_or_a_queue_pays_once(self, server: BatchServer, run: Run) -> None:
        Asking(run, "openai")("a")
        server.end("failed")
        error = {"code": "token_limit_exceeded", "message": "90,000 enqueued tokens"}
        server.more = {"errors": {"data": [error]}}
        assert Asking(run, "openai")("a") == [None]
        server.end()
        server.more = {"output_file_id": None, "request_counts": {"completed": 1}}
        with pytest.raises(UsageError, match="names no file"):
            Asking(run, "openai")("a")
        server.more = {}
        assert Asking(run, "openai")("a") != [None]
        assert len(server.batches) == 2


def verdict(candidate: Candidate) -> Evaluation:
    return judged(2.0, candidate.source).model_copy(update={"digest": candidate.digest})


def test_all_prompts_of_a_round_go_in_one_batch(api: str, server: BatchServer, run: Run) -> None:
    def lines(batch: Batch) -> bytes:
        found = []
        for number, each in enumerate(batch.asked):
            body = json.dumps(batch.asked[each])
            text = f"```cpp\nvoid {OP}() {{ int x{batch.name}{number}; }}\n```"
            if "analyst" in body and "recommend" in body:
                text = json.dumps({"bottleneck": "b", "change": "c", "expected_speedup": 2.0})
            found.append(json.dumps(batch.answer(each, text)) + "\n")
        return "".join(found).encode()

    server.lines = lines

    def go() -> Any:
        return run_loop(
            run,
            open_op(OP),
            Language.CPP,
            model_of(api, run),
            verdict,
            6,
            "a CPU",
            strategy=open_strategy("beam", width=3),
        )

    rounds, found = 1, None
    with pytest.raises(WaitingError, match="and 2 more"):
        go()
    while found is None:
        server.end()
        try:
            found = go()
        except WaitingError:
            rounds += 1
    assert len(server.batches[0].asked) == 3
    assert found.stopped == "iterations"
    assert len(found.iterations) == 6
    account = Budget(run).account
    asked = sum(len(batch.asked) for batch in server.batches)
    assert rounds == len(server.batches) < asked
    assert account.used.usd == pytest.approx(asked * half(api))
    assert account.unknown.usd == 0
    assert account.reserved == {}


class Later:
    """A model of another package, which is paid and answers later."""

    name = "later"
    ready = False

    def worst_cost_usd(self, request: Request) -> float | None:
        return 1.0

    def ask(self, request: Request) -> Reply:
        if not self.ready:
            raise WaitingError("not yet", "come again")
        usage: Any = {"cost_usd": 0.25}
        digest = request.digest
        return Reply.model_validate(
            {
                "text": "text",
                "model": "later",
                "usage": usage,
                "stop_reason": "end_turn",
                "source": "api",
                "prompt_digest": digest,
            }
        )


def test_what_waits_keeps_its_reservation(run: Run) -> None:
    model, client = Later(), ModelClient(Budget(run, SpendingLimits(usd=1.5)))
    for _ in range(2):
        with pytest.raises(WaitingError):
            client.ask(model, request("a"))
        account = Budget(run).account
        assert (account.set_aside.usd, account.spent_usd) == (1.0, 0.0)
    with pytest.raises(BudgetError):
        client.ask(model, request("b"))
    model.ready = True
    client.ask(model, request("a"))
    account = Budget(run).account
    assert (account.used.usd, account.committed_usd) == (0.25, 0.25)
    assert not account.waiting
