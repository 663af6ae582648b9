"""Both real SDKs against local servers that speak their protocols: streams, faults, secrets."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import json
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_servers import APIS, KEY, Api, ApiServer, Item, Slept
from pydantic import ValidationError

from patcher.attempts import Recommendation
from patcher.bench import BudgetError, MissingError, PatcherError, UsageError, VerificationError
from patcher.models import Image, ModelError, Reply, Request, open_model
from patcher.models.budget import Budget
from patcher.models.ceilings import Amount, SpendingLimits
from patcher.models.client import REPHRASED, ModelClient
from patcher.models.openai import OpenAIModel
from patcher.models.prices import CacheShares
from patcher.models.registry import ModelEntry
from patcher.models.retry import TRIES, Clock, alarm
from patcher.prompting.extract import strict_schema, unusable
from patcher.runs.run import Run

STEP = "op/0/ask-generate"


def request(max_tokens: int = 4000, images: tuple[Image, ...] = ()) -> Request:
    return Request(
        step=STEP,
        role="generate",
        system="You write kernels.",
        prompt="Write one.",
        max_tokens=max_tokens,
        images=images,
    )


def ask(run: Run, api: Api, server: ApiServer, slept: Slept, **more: Any) -> Reply:
    """Through the budget, as the loop asks."""
    client = ModelClient(Budget(run, SpendingLimits(usd=5.0)), clock=slept.clock)
    asked = client.ask(api.open(server, **more), request())
    return asked.reply


def held_to(seen: dict[str, Any]) -> object:
    """The schema that a server was asked to hold its reply to."""
    ours = seen.get("output_config", {}).get("format", {}).get("schema")
    return ours or seen.get("response_format", {}).get("json_schema", {}).get("schema")


def spent(run: Run) -> Amount:
    found = Budget(run).account
    assert not found.reserved
    return found.spent


class TestReplies:
    def test_streams_a_reply_with_usage_and_price(self, api: Api, server: ApiServer) -> None:
        server.script = [api.reply("Hello, kernel")]
        model = api.open(server)
        reply = model.ask(request())
        assert reply.text == "Hello, kernel"
        assert (reply.source, reply.stop_reason, reply.truncated) == ("api", "end_turn", False)
        assert reply.model == api.model
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (300, 2000)
        price = model.entry.price
        assert price is not None
        assert reply.usage.cost_usd == pytest.approx(price.cost_usd(300, 2000))
        [seen] = server.seen
        assert (seen["path"], seen["key"], seen["model"]) == (api.path, KEY, api.model)
        assert seen["stream"] is True
        assert seen["messages"][-1] == {"role": "user", "content": "Write one."}
        system = seen["system"] if api.name == "anthropic" else seen["messages"][0]["content"]
        assert system == "You write kernels."
        assert seen["max_tokens"] == 4000

    def test_the_head_of_a_prompt_is_kept_and_its_tokens_have_their_price(
        self, server: ApiServer, run: Run
    ) -> None:
        api = APIS["anthropic"]

        def cached(**counts: int) -> Item:
            item = api.reply()
            counted = json.dumps({"input_tokens": 300, **counts}).encode()[1:-1]
            return replace(item, body=item.body.replace(b'"input_tokens": 300', counted))

        asked = request().model_copy(update={"prompt": "h" * 4000 + "rest", "head": 4000})
        server.script = [
            cached(cache_creation_input_tokens=1000),
            cached(cache_read_input_tokens=1000),
            cached(cache_read_input_tokens=1000),
        ]
        model = api.open(server, prompt_cache=True)
        wrote, read = (model.ask(asked).usage for _ in range(2))
        for seen in server.seen:
            head, rest = seen["messages"][-1]["content"]
            assert head["cache_control"] == {"type": "ephemeral"}
            assert (head["text"], rest["text"]) == ("h" * 4000, "rest")
            assert "cache_control" not in rest
        plain = model.entry.price
        assert plain is not None
        assert plain.cache == CacheShares(read=0.1, written=1.25)
        assert wrote.cost_usd == pytest.approx(plain.cost_usd(300 + 1250, 2000))
        assert read.cost_usd == pytest.approx(plain.cost_usd(300 + 100, 2000))
        assert (read.input_tokens, read.cached_tokens) == (1300, 1000)
        worst = model.worst_cost_usd(asked)
        assert worst is not None
        assert worst > plain.cost_usd(model.worst_tokens(asked) - 4000, 4000)

        # who did not ask for a cache pays in full what a server says to have read
        bare = api.open(server).ask(asked).usage
        assert bare.cost_usd == pytest.approx(plain.cost_usd(1300, 2000))
        assert server.seen[-1]["messages"][-1]["content"] == asked.prompt

    def test_a_server_of_its_own_is_not_asked_to_keep_anything(self) -> None:
        own = ModelEntry(provider="anthropic", model="claude-opus-5-5")
        assert own.keeps_prompts
        assert not own.model_copy(update={"base_url": "http://localhost:1"}).keeps_prompts
        assert not ModelEntry(provider="openai", model="gpt-5.5").keeps_prompts
        with pytest.raises(ValidationError, match="prompt_cache is for provider anthropic"):
            ModelEntry(provider="openai", model="gpt-5.5", prompt_cache=True)
        with pytest.raises(ValidationError, match="anthropic has no effort minimal"):
            ModelEntry(provider="anthropic", model="claude-opus-5-5", effort="minimal")

    def test_how_tokens_are_drawn_goes_to_the_server_as_it_is(
        self, api: Api, server: ApiServer
    ) -> None:
        server.script = [api.reply(), api.reply()]
        drawn = {"temperature": 0.2, "repeat_penalty": 1.1, "seed": 7}
        api.open(server, sampling=drawn).ask(request())
        api.open(server).ask(request())
        said, silent = server.seen
        assert {name: said[name] for name in drawn} == drawn
        assert not set(drawn) & set(silent)
        for sampling, why in (
            ({"max_tokens": 9}, "max_tokens is set by patcher itself"),
            ({"temperature": float("nan")}, "temperature must be finite"),
            ({"stop": ["x"]}, "sampling.stop"),
        ):
            with pytest.raises(ValidationError, match=why):
                ModelEntry(provider=api.name, model="m", sampling=sampling)  # type: ignore[arg-type]

    def test_a_reply_may_be_asked_for_whole(self, server: ApiServer) -> None:
        usage = {"prompt_tokens": 300, "completion_tokens": 40}
        choice = {"index": 0, "message": {"content": "Hello"}, "finish_reason": "length"}
        whole = {"model": "gpt-5.4-mini", "choices": [choice], "usage": usage}
        server.script = [Item(json.dumps(whole).encode())]
        reply = APIS["openai"].open(server, stream=False).ask(request())
        assert (reply.text, reply.stop_reason, reply.repairs) == ("Hello", "max_tokens", ())
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (300, 40)
        [seen] = server.seen
        assert seen["stream"] is False
        assert "stream_options" not in seen
        with pytest.raises(ValidationError, match="stream = false is for provider openai"):
            ModelEntry(provider="anthropic", model="claude-opus-5-5", stream=False)

    def test_effort_has_the_name_of_each_protocol(self, api: Api, server: ApiServer) -> None:
        server.script = [api.reply(), api.reply()]
        api.open(server, effort="xhigh").ask(request())
        api.open(server).ask(request())
        said, silent = server.seen
        if api.name == "anthropic":
            assert said["output_config"] == {"effort": "xhigh"}
        else:
            assert said["reasoning_effort"] == "xhigh"
        assert not {"output_config", "reasoning_effort"} & set(silent)

    def test_advice_is_held_to_its_schema_where_the_server_can(
        self, api: Api, server: ApiServer
    ) -> None:
        schema = strict_schema(Recommendation)
        asked = request().model_copy(update={"role": "analyse", "answer_schema": schema})
        refusal = api.fault("invalid_request_error", "output_config.format / response_format: no")
        refused = Item(json.dumps(refusal).encode(), 400)
        server.script = [api.reply(), api.reply(), refused, api.reply(), api.reply()]
        model = api.open(server, structured=True, effort="low")
        model.ask(asked)
        model.ask(request())  # no schema
        model.ask(asked)  # refused, and asked again without
        model.ask(asked)
        assert [held_to(seen) for seen in server.seen] == [schema, None, schema, None, None]
        last = server.seen[-1]
        assert "low" in (last.get("reasoning_effort"), last.get("output_config", {}).get("effort"))

        server.script = [api.reply(), Item(json.dumps(refusal).encode(), 400)]
        unasked = api.open(server)
        unasked.ask(asked)
        assert held_to(server.seen[-1]) is None
        with pytest.raises(UsageError):
            unasked.ask(asked)

    def test_a_server_without_usage_is_paid_the_worst_case(
        self, server: ApiServer, run: Run
    ) -> None:
        openai = APIS["openai"]
        server.script = [Item(b"".join(openai.events(tokens=None)))]
        reply = ask(run, openai, server, Slept())
        model = openai.open(server)
        assert reply.usage.output_tokens is None
        assert spent(run).usd == model.worst_cost_usd(request())
        assert spent(run).tokens == model.worst_tokens(request())

    def test_a_prompt_that_its_server_cut_is_told(self, api: Api, server: ApiServer) -> None:
        asked = request().model_copy(update={"prompt": "a word " * 1000})
        for tokens, told in ((1000, True), (2000, False)):
            server.script = [Item(b"".join(api.events(tokens=(tokens, 10))))]
            repairs = api.open(server).ask(asked).repairs
            assert any("may have cut the prompt" in each for each in repairs) is told

    @pytest.mark.parametrize(
        ("total", "output"), [(431, 331), (120, 20), (7, 20), (10**9, None), ("431", 20)]
    )
    def test_thinking_that_only_the_total_counts_is_output(
        self, server: ApiServer, total: object, output: int | None
    ) -> None:
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": total}
        done = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
        server.script = [Item(json.dumps({**done, "usage": usage}).encode())]
        entry = ModelEntry(
            provider="openai",
            model="grok",
            base_url=f"{server.url}/v1",
            input_usd_per_mtok=1,
            output_usd_per_mtok=10,
        )
        reply = OpenAIModel(entry).ask(request())
        assert reply.usage.output_tokens == output
        if output:
            assert reply.usage.cost_usd == pytest.approx((100 + 10 * output) / 1e6)

    def test_the_room_has_the_name_that_the_server_knows(self, server: ApiServer) -> None:
        openai = APIS["openai"]
        refusal = openai.fault("unsupported_parameter", "use the other")
        refusal["error"]["param"] = "max_tokens"
        server.script = [
            Item(json.dumps(refusal).encode(), 400),
            openai.reply(),
            openai.reply(),
        ]
        model = openai.open(server)
        assert [model.ask(request()).text for _ in range(2)] == ["Hello", "Hello"]
        names = [{"max_tokens", "max_completion_tokens"} & set(seen) for seen in server.seen]
        assert names == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]

    def test_images_are_shown_and_counted(self, api: Api, server: ApiServer, run: Run) -> None:
        picture = run.path / "roofline.png"
        picture.write_bytes(png())
        image = Image.of(run.path, "roofline.png")
        server.script = [api.reply()]
        model = api.open(server, run_dir=run.path, images=True)
        assert model.ask(request(images=(image,))).text == "Hello"
        [shown] = api.images(server.seen[0])
        assert base64.b64decode(shown) == png()
        assert request(images=(image,)).digest != request().digest
        assert model.worst_tokens(request(images=(image,))) > model.worst_tokens(request())

        with pytest.raises(UsageError, match="takes no images"):
            api.open(server, run_dir=run.path).ask(request(images=(image,)))  # not its own server
        picture.write_bytes(png(3))
        with pytest.raises(VerificationError, match="changed"):
            model.ask(request(images=(image,)))
        assert len(server.seen) == 1


class TestRetries:
    @pytest.mark.parametrize(
        ("status", "kind", "trouble"),
        [
            (429, "rate_limit_error", "rate_limit"),
            (529, "overloaded_error", "overloaded"),
            (503, "overloaded", "overloaded"),
            (500, "api_error", "server"),
        ],
    )
    def test_a_passing_fault_is_tried_again_later_and_later(
        self, api: Api, server: ApiServer, run: Run, status: int, kind: str, trouble: Any
    ) -> None:
        slept = Slept()
        server.script = [api.failure(status, kind)] * 2 + [api.reply()]
        assert ask(run, api, server, slept).text == "Hello"
        first = TRIES[trouble][1]
        assert slept.pauses == [first * 0.75, 2 * first * 0.75]
        assert len(server.seen) == 3
        notes = [event.data for event in run.events if "trouble" in event.data]
        assert [note["trouble"] for note in notes] == [trouble] * 2
        assert [note["spent_usd"] for note in notes] == [0.0, 0.0]

    def test_a_lasting_fault_stops_the_run_which_can_be_resumed(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        tries = TRIES["overloaded"][0]
        server.script = [api.failure(529, "overloaded_error", "Overloaded")] * tries
        with pytest.raises(ModelError, match="Overloaded") as caught:
            ask(run, api, server, Slept())
        assert "resume" in caught.value.hint
        assert (len(server.seen), spent(run).usd) == (tries, 0.0)
        server.script = [api.reply()]
        assert ask(run, api, server, Slept()).text == "Hello"

    @pytest.mark.parametrize(
        ("headers", "pause"),
        [
            ({"retry-after": "7"}, 7 * 1.05),
            ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5 * 1.05),
            ({"retry-after": "0.1"}, 1.05),
            ({"retry-after": "0"}, 3.0),
            ({"retry-after": "-50"}, 3.0),
            ({"retry-after": "soon"}, 3.0),
            ({"retry-after": "inf"}, 3.0),
        ],
    )
    def test_a_wish_of_the_server_is_honoured(
        self, api: Api, server: ApiServer, run: Run, headers: dict[str, str], pause: float
    ) -> None:
        slept = Slept()
        server.script = [api.failure(429, "rate_limit_error", headers=headers), api.reply()]
        ask(run, api, server, slept)
        assert slept.pauses == [pytest.approx(pause)]

    def test_a_wish_may_be_a_date_and_a_long_one_stops(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        slept = Slept()
        past = email.utils.formatdate(time.time() - 60, usegmt=True)
        hour = email.utils.formatdate(time.time() + 3600, usegmt=True)
        server.script = [
            api.failure(429, "rate_limit_error", headers={"retry-after": when})
            for when in (past, hour)
        ]
        with pytest.raises(ModelError) as caught:
            ask(run, api, server, slept)
        assert "may be asked again in 60 minutes" in caught.value.hint
        assert slept.pauses == [3.0]  # one that is past is none

    def test_silence_is_a_timeout_and_may_have_been_billed(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        begun = b"".join(api.events()[:2])
        server.script = [Item(b"", then="silent"), Item(begun, then="silent"), api.reply()]
        model = api.open(server)
        assert ask(run, api, server, Slept(), quiet_s=0.2).text == "Hello"
        notes = [event.data for event in run.events if "trouble" in event.data]
        assert [note["trouble"] for note in notes] == ["timeout", "broken"]
        assert {note["spent_usd"] for note in notes} == {model.worst_cost_usd(request())}

    @pytest.mark.parametrize("status", [408, 502, 504])
    def test_a_gateway_that_gave_up_may_have_been_billed(
        self, api: Api, server: ApiServer, run: Run, status: int
    ) -> None:
        server.script = [Item(b"<html>Bad gateway</html>", status), api.reply()]
        assert ask(run, api, server, Slept()).text == "Hello"
        [note] = [event.data for event in run.events if "trouble" in event.data]
        assert note["spent_usd"] == api.open(server).worst_cost_usd(request())

    @pytest.mark.parametrize("begun", [0, 3])
    def test_a_call_is_stopped_when_its_time_is_over(
        self, api: Api, server: ApiServer, run: Run, begun: int
    ) -> None:
        """The alarm ends the SDK's wait for a socket; the time alone is shortened here."""
        server.script = [Item(b"".join(api.events()[:begun]), then="silent")]
        clock = Clock(alarm=lambda seconds: alarm(0.3))
        client = ModelClient(Budget(run, SpendingLimits(minutes=1.0)), clock=clock)
        with pytest.raises(BudgetError, match="stopped"):
            client.ask(api.open(server), request())
        assert spent(run).usd == api.open(server).worst_cost_usd(request())

    @pytest.mark.parametrize("events", [0, 1, 3])
    def test_a_dropped_connection(self, api: Api, server: ApiServer, run: Run, events: int) -> None:
        begun = b"".join(api.events()[:events])
        server.script = [Item(begun, then="reset"), Item(begun + b"data: {", then="reset")]
        server.script.append(api.reply())
        assert ask(run, api, server, Slept()).text == "Hello"
        worst = api.open(server).worst_cost_usd(request())
        assert worst is not None
        assert spent(run).usd > 2 * worst  # both may have been billed

    def test_nobody_listens(
        self, api: Api, server: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept = Slept()
        monkeypatch.setenv(f"{api.name.upper()}_BASE_URL", "http://127.0.0.1:1")
        with pytest.raises(ModelError, match="no connection") as caught:
            ask(run, api, server, slept)
        assert not caught.value.charged
        assert len(slept.pauses) == TRIES["network"][0] - 1
        assert spent(run).usd == 0

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"data: {nonsense\n\n",
            b"event: message_start\ndata: {nonsense\n\n",
            b"data: []\n\ndata: 7\n\ndata: {}\n\n",
            b"event: message_delta\ndata: {}\n\n",
            b'data: {"choices": [{"delta": null}]}\n\n',
            b"data: \xff\xfe\n\n",
        ],
    )
    def test_nonsense_is_no_reply(self, api: Api, server: ApiServer, run: Run, body: bytes) -> None:
        server.script = [Item(body), api.reply()]
        assert ask(run, api, server, Slept()).text == "Hello"
        [note] = [event.data for event in run.events if "trouble" in event.data]
        assert note["trouble"] == "broken"
        assert note["spent_usd"] > 0

    @pytest.mark.parametrize("kind", ["overloaded_error", "rate_limit_error", "server_error"])
    def test_a_fault_inside_the_stream(
        self, api: Api, server: ApiServer, run: Run, kind: str
    ) -> None:
        begun = b"".join(api.events()[:3])
        server.script = [Item(begun + api.error_event(kind, "sorry")), api.reply()]
        assert ask(run, api, server, Slept()).text == "Hello"
        [note] = [event.data for event in run.events if "trouble" in event.data]
        assert note["trouble"] == kind.removesuffix("_error").replace("_error", "")
        assert note["spent_usd"] > 0

    def test_a_stream_cut_after_each_event(self, api: Api, server: ApiServer) -> None:
        whole = api.events()
        model = api.open(server)
        last = {"anthropic": 1, "openai": 2}[api.name]  # events after the reason to stop
        for cut in range(len(whole)):
            server.script = [Item(b"".join(whole[:cut]))]
            if cut >= len(whole) - last:
                reply = model.ask(request())
                assert (reply.text, reply.stop_reason) == ("Hello", "end_turn")
            else:
                with pytest.raises(ModelError) as caught:
                    model.ask(request())
                assert (caught.value.trouble, caught.value.charged) == ("broken", True)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_whatever_a_server_streams_is_a_reply_or_one_clear_error(
    server: ApiServer, data: st.DataObject
) -> None:
    api = APIS[data.draw(st.sampled_from(sorted(APIS)))]
    events = data.draw(st.permutations(api.events()))
    kept = events[: data.draw(st.integers(0, len(events)))]
    at = data.draw(st.integers(0, 400))
    stream = b"".join(kept)
    server.script = [Item(stream[:at] + data.draw(st.binary(max_size=8)) + stream[at:])]
    with contextlib.suppress(PatcherError):
        assert api.open(server).ask(request()).stop_reason


class TestLastingFaults:
    @pytest.mark.parametrize(
        ("status", "kind", "message", "expected"),
        [
            (401, "authentication_error", f"invalid key {KEY}", MissingError),
            (401, "invalid_api_key", f"Incorrect API key provided: {KEY}", MissingError),
            (403, "permission_error", "not yours", MissingError),
            (402, "billing_error", "no credit", BudgetError),
            (429, "insufficient_quota", "You exceeded your quota", BudgetError),
            (400, "invalid_request_error", "max_tokens: too large", UsageError),
            (404, "not_found_error", "no such model", UsageError),
        ],
    )
    def test_they_stop_at_once(
        self,
        api: Api,
        server: ApiServer,
        run: Run,
        status: int,
        kind: str,
        message: str,
        expected: type[PatcherError],
    ) -> None:
        slept = Slept()
        server.script = [api.failure(status, kind, message)]
        with pytest.raises(expected) as caught:
            ask(run, api, server, slept)
        assert (len(server.seen), slept.pauses, spent(run).usd) == (1, [], 0.0)
        assert caught.value.hint
        assert KEY not in str(caught.value)
        # the SDK's exception holds the request and its headers
        assert caught.value.__cause__ is None

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (
                [{"error": {"code": 400, "message": "no such field", "status": "X"}}],
                "no such field",
            ),
            ({"detail": "the model is not loaded"}, "the model is not loaded"),
            ({"detail": [{"loc": ["body", "seed"], "msg": "not allowed"}]}, "seed: not allowed"),
            ("upstream connect error", "upstream connect error"),
            ("<html>no</html>", "HTTP 400"),
            ([], "HTTP 400"),
            ({"detail": [7, {"msg": 7}]}, "HTTP 400"),
        ],
    )
    def test_what_other_servers_say(
        self, api: Api, server: ApiServer, body: object, said: str
    ) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        server.script = [Item(text.encode(), 400)]
        with pytest.raises(UsageError) as caught:
            api.open(server).ask(request())
        assert caught.value.message.endswith(f": {said}")

    def test_a_wrong_key_of_google(self, server: ApiServer) -> None:
        body = [{"error": {"code": 400, "message": "API key not valid. Please pass a valid one."}}]
        server.script = [Item(json.dumps(body).encode(), 400)]
        with pytest.raises(MissingError, match="refused the key"):
            APIS["openai"].open(server).ask(request())

    def test_an_empty_account(self, api: Api, server: ApiServer, run: Run) -> None:
        server.script = [api.failure(*api.quota)]
        with pytest.raises(BudgetError, match="cannot pay"):
            ask(run, api, server, Slept())
        assert len(server.seen) == 1

    def test_the_key_is_nowhere_in_the_run_and_the_reply_is_paid_once(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        server.script = [
            api.failure(401, "authentication_error", f"bad key {KEY}"),
            api.failure(429, "rate_limit_error", f"slow down, {KEY}"),
            api.reply(f"Your key is {KEY}, I think"),
        ]
        with pytest.raises(MissingError):
            ask(run, api, server, Slept())
        for _ in range(2):
            assert ask(run, api, server, Slept()).text == "Your key is [key], I think"
        price = api.open(server).entry.price
        assert price is not None
        assert spent(run).usd == pytest.approx(price.cost_usd(300, 2000))
        assert spent(run).tokens == 2300
        assert len(server.seen) == 3
        for path in run.path.rglob("*"):
            assert path.is_dir() or KEY.encode() not in path.read_bytes()


class TestFollowUps:
    def test_a_cut_reply_gets_more_room_and_is_never_parsed(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        server.script = [api.reply("```cpp\nint half", "max_tokens")] * 2 + [api.reply("whole")]
        reply = ask(run, api, server, Slept(), max_output_tokens=16_000)
        assert (reply.text, unusable(reply)) == ("whole", None)
        assert [seen["max_tokens"] for seen in server.seen] == [4000, 8000, 16_000]
        assert reply.usage.output_tokens == 6000  # all three were paid
        assert spent(run).tokens == 6900
        assert ask(run, api, server, Slept()).usage == reply.usage  # and none twice
        assert len(server.seen) == 3

    def test_at_the_most_room_it_stays_cut(self, api: Api, server: ApiServer, run: Run) -> None:
        server.script = [api.reply("```cpp\nint half", "max_tokens")] * 2
        reply = ask(run, api, server, Slept(), max_output_tokens=6000)
        assert [seen["max_tokens"] for seen in server.seen] == [4000, 6000]
        failure = unusable(reply)
        assert failure is not None
        assert failure.kind == "truncated"

    def test_a_refusal_is_put_in_other_words_once(
        self, api: Api, server: ApiServer, run: Run
    ) -> None:
        server.script = [api.reply("", "refusal"), api.reply("done")]
        assert ask(run, api, server, Slept()).text == "done"
        said = [seen["messages"][-1]["content"] for seen in server.seen]
        assert said == ["Write one.", REPHRASED + "Write one."]

    def test_a_second_refusal_is_the_answer(self, api: Api, server: ApiServer, run: Run) -> None:
        server.script = [api.reply("", "refusal")] * 2
        failure = unusable(ask(run, api, server, Slept()))
        assert failure is not None
        assert failure.kind == "refused"
        assert len(server.seen) == 2

    def test_a_filter_in_front_of_the_model_is_a_refusal(self, server: ApiServer, run: Run) -> None:
        openai = APIS["openai"]
        server.script = [openai.failure(400, "content_filter"), openai.reply("done")]
        assert ask(run, openai, server, Slept()).text == "done"


class TestRegisteredServers:
    def test_a_server_of_ones_own_needs_no_key_and_gets_none(
        self, server: ApiServer, tmp_path: Path
    ) -> None:
        server.script = [APIS["openai"].reply()]
        local = ModelEntry(provider="openai", model="qwen", base_url=f"{server.url}/v1")
        model = open_model("local", tmp_path, {"local": local})
        assert model.ask(request()).text == "Hello"
        assert KEY not in str(server.seen)  # OPENAI_API_KEY is not for this server
        assert model.worst_cost_usd(request()) is None
        priced = local.model_copy(update={"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0})
        free = open_model("local", tmp_path, {"local": priced})
        assert free.worst_cost_usd(request()) == 0.0

    def test_its_key_is_in_its_own_variable(
        self, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registry = {
            "lab": ModelEntry(
                provider="anthropic", model="m", base_url=server.url, key_variable="LAB_KEY"
            )
        }
        with pytest.raises(MissingError, match="LAB_KEY is not set"):
            open_model("lab", tmp_path, registry)
        monkeypatch.setenv("LAB_KEY", "clé")
        with pytest.raises(MissingError, match="characters") as caught:
            open_model("lab", tmp_path, registry)
        assert "cl" not in str(caught.value).replace("characters", "")
        monkeypatch.setenv("LAB_KEY", "lab-key")
        server.script = [APIS["anthropic"].reply()]
        open_model("lab", tmp_path, registry).ask(request())
        assert server.seen[0]["key"] == "lab-key"


def png(size: int = 2) -> bytes:
    """A grey image of size x size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(size)) * size)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )
