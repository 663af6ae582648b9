"""Ways to serve, compared over HTTP: prompts, requests and what a client says of them."""

from __future__ import annotations

import importlib.metadata
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from served_sample import (
    CLIENT,
    FAST,
    JOB,
    POINTS,
    SLOW,
    WORKLOAD,
    serve_by_doubles,
)

from patcher.ab.served import compare_served
from patcher.ab.server import WarmUp, announce_plugin, warm_up
from patcher.bench import PatcherError, UsageError
from patcher.bench.ab.phases import silent
from patcher.bench.ab.served import (
    ServedPoint,
    points_of,
    requests_of,
    run_of,
    traces,
)
from patcher.bench.engines.architecture import full_config
from patcher.bench.engines.served_prompts import ServedPrompts
from patcher.bench.engines.serving import client_of, clients, flags, request_line
from patcher.integrate import vllm as vllm_plugin


@pytest.fixture(autouse=True)
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_doubles(tmp_path, monkeypatch)


def test_warm_up_goes_on_until_nothing_is_faster() -> None:
    asked: list[int] = []
    seconds = iter([2.0] * 4 + [1.0] * 4 + [0.95] * 4 + [0.1] * 4)

    def send(users: int) -> float:
        asked.append(users)
        return next(seconds)

    assert warm_up(send, 6).passes_s == (8.0, 4.0, 3.8)
    assert asked == [1, 2, 4, 6] * 3
    falling = iter([64.0, 32.0, 16.0, 8.0, 4.0, 2.0])
    assert warm_up(lambda _: next(falling), 1).passes_s == (64.0, 32.0, 16.0, 8.0, 4.0)
    limit = WarmUp(passes_s=(1, 1), last_s={1: 0.1, 8: 0.4}).limit_ms(4)
    assert limit == pytest.approx(800)


def test_figures_are_those_of_the_requests() -> None:
    point, trace = ServedPoint(trace="fixed", concurrency=2), traces()["fixed"]
    found: dict[str, Any] = {
        "duration": 2.0,
        "input_lens": [10, 20],
        "output_lens": [3, 5],
        "ttfts": [0.1, 3.0],
        "itls": [[0.01, 0.03], [0.02, 0.02]],  # two tokens came at once, twice
    }
    run = run_of(point, trace, found)
    assert run.output_tokens_per_s == 4
    assert run.total_tokens_per_s == 19
    assert run.tpot_ms["p50"] == pytest.approx(15)  # of 20 and 10
    assert run.longest_gap_ms == 3000
    assert run.goodput_per_s == 0  # one has too long between tokens, one came too late
    with pytest.raises(PatcherError, match="1 of 2 requests failed at fixed, 2 at a time: refused"):
        run_of(point, trace, found | {"output_lens": [3, 0], "errors": ["", "Traceback\nrefused"]})


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"duration": 0}, "division by zero"),
        ({"duration": -1}, "greater than 0"),
        ({"duration": math.nan}, "finite"),
        ({"duration": math.inf}, "greater than 0"),
        ({"duration": 1e-320}, "finite"),
        ({"output_lens": [math.inf, 5]}, "infinity"),
        ({"output_lens": [10**400, 5]}, "too large"),
        ({"input_lens": [-50, 5]}, "greater than or equal to 0"),
        ({"ttfts": [math.nan, 0.1]}, "no time in seconds"),
        ({"ttfts": [math.inf, 0.1]}, "no time in seconds"),
        ({"itls": [[-0.1, 0.5], [0.1]]}, "no time in seconds"),
        ({"itls": [[], []]}, "came whole"),
        ({"itls": [[0, 0], [0]]}, "came whole"),
    ],
)
def test_a_result_that_no_server_could_give_is_none(update: dict[str, Any], said: str) -> None:
    found = {"duration": 2.0, "input_lens": [10, 20], "output_lens": [3, 5], "ttfts": [0.1, 3.0]}
    found |= {"itls": [[0.01, 0.03], [0.02, 0.02]]}
    expected = (PatcherError, ValueError, ArithmeticError)
    with pytest.raises(expected, match=said):
        run_of(POINTS[1], traces()["fixed"], found | update)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("found['duration'] = 0", "wrote no result that can be read: ZeroDivisionError"),
        ("found['duration'] = float('nan')", "wrote no result .*duration_s: .* finite number$"),
        ("found = {name: value[:-1] for name, value in found.items()}", "11 requests"),
        ("found['output_lens'] = [128] * 12", "12 requests got 1,536 .* 12 with 3,072 were asked"),
    ],
)
def test_what_was_not_asked_for_is_not_measured(change: str, said: str, tmp_path: Path) -> None:
    """Fewer tokens, such as of a model that stops early, are another load."""
    lines = [
        "import json, sys",
        "found = dict(input_lens=[1] * 12, output_lens=[256] * 12)",
        "found |= dict(ttfts=[0.1] * 12, itls=[[0.1]] * 12)",
        change,
        "found.setdefault('duration', 1)",
        "json.dump(found, open(sys.argv[1], 'w'))",
    ]
    (tmp_path / "absurd_client.py").write_text("\n".join(lines))
    serving = CLIENT.model_copy(update={"bench": ("absurd_client", "{folder}/{result}")})
    job = replace(JOB, serving=serving, process_pairs=1, points=POINTS[:1])
    with pytest.raises(PatcherError, match=said):
        compare_served(job, (SLOW, FAST), tmp_path, silent)
    assert not list(tmp_path.glob("served-*/pair-*.json"))


def test_a_damaged_tokenizer_is_told(tmp_path: Path) -> None:
    real = WORKLOAD.model_copy(update={"model": str(tmp_path), "weights": "local"})
    (tmp_path / "config.json").write_text(json.dumps(full_config("gpt-oss-tiny")))
    fast = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "tokenizer_config.json").write_text(fast)
    for damaged in ("{", '{"version": "1.0"}', "[]", '{"added_tokens": [], "model": 3}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(UsageError, match=r"the tokenizer of .* cannot be read: ."):
            ServedPrompts(real)


def test_an_answer_has_the_length_that_is_asked_for_with_a_trained_tokenizer(
    tmp_path: Path,
) -> None:
    """Some clients take the length of an answer from its text."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "a": 1, "aa": 2, "b": 3}
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "a")]))
    base.decoder = decoders.ByteLevel()
    base.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=base, bos_token="<s>").save_pretrained(tmp_path)
    real = WORKLOAD.model_copy(update={"model": str(tmp_path), "weights": "local"})
    (tmp_path / "config.json").write_text(json.dumps(full_config("gpt-oss-tiny")))
    prompts, tokenizer = ServedPrompts(real), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer.encode(prompts.text([1, 1]))) == 2, "both were joined"
    assert [len(tokenizer.encode(prompts.answer(length))) for length in (2, 256)] == [2, 256]
    drawn = ServedPrompts(WORKLOAD)
    assert len(drawn.answer(5000).split()) == 5000 > max(drawn.vocabulary)


def test_prompts_are_equal_for_both_arms_new_for_each_run_and_share_what_they_should() -> None:
    mixed = traces()["mixed"]
    words = range(2, 1000)
    one, same, other = (requests_of(mixed, 60, words, seed) for seed in (1500, 1500, 1510))
    assert one == same
    assert not {tuple(each.prompt) for each in one} & {tuple(each.prompt) for each in other}
    cached = [each.prompt[:2304] for each in one + other if len(each.prompt) == 2560]
    assert len(cached) > 4
    assert len({tuple(prompt) for prompt in cached}) == 2
    assert {len(each.prompt) for each in one} == {part.input_len for part in mixed.parts}


def test_a_checkout_is_announced_to_the_engine(tmp_path: Path) -> None:
    announce_plugin(CLIENT, tmp_path)
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    [entry] = found.entry_points
    assert (entry.group, entry.name) == ("vllm.general_plugins", "patcher")
    assert entry.load() is vllm_plugin.register


def test_traces_and_clients_are_data() -> None:
    assert [one.label for one in points_of("fixed", [1, 128])][1] == "fixed, 128 at a time"
    assert [traces()["fixed"].requests(users) for users in (1, 8, 16, 64)] == [12, 64, 64, 192]
    for names, users in (("no", None), ("fixed,fixed", None), ("fixed", [8, 8])):
        with pytest.raises(UsageError):
            points_of(names, users)
    assert client_of(None, "vllm")[0] == "vllm-bench"
    for name, engine in (("vllm-bench", "sglang"), ("no", "vllm"), (None, "transformers")):
        with pytest.raises(UsageError, match=r"client|engine") as raised:
            client_of(name, engine)
        assert "sglang-bench (--engine sglang)" in raised.value.hint
    for one in clients().values():
        assert one.offline or json.loads(request_line(one.request, 'a "b" {answer}', "c", 7))
    given: dict[str, JsonValue] = {
        "a_b": True,
        "c": False,
        "d": {"e": 1},
        "f": None,
        "g": 0.5,
        "h": "i",
    }
    assert flags(given) == ["--a-b", "--no-c", "--d", '{"e": 1}', "--g", "0.5", "--h", "i"]
