"""The vLLM driver, against a double of its engine, and its names against the real vLLM.

The double stands for what needs a GPU: it gives tokens as `EngineCore.step_with_batch_queue` does
when it schedules asynchronously (one batch ahead, a step may give nothing), with `RequestOutput`s
of new tokens alone.
"""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_here import needs_vllm

from patcher import bench
from patcher.ab.arm import ArmServer, delay_of
from patcher.bench import Shape, Workload
from patcher.bench.engines import open_engine, open_measurable
from patcher.bench.engines import vllm as driver
from patcher.bench.engines.served_model import longest, served_model
from patcher.bench.engines.vllm import VllmEngine
from patcher.bench.engines.vllm_weights import RANDOM_WEIGHTS, refuse_dummy
from patcher.integrate import Receipt, worker_receipts

VOCAB = 31
WORKLOAD = Workload(
    model="gpt-oss-20b",
    engine="vllm",
    device="cuda",
    dtype="bfloat16",
    batch=3,
    input_len=5,
    output_len=12,
    weights="hub",
)


class Kind(Enum):
    CUMULATIVE = 0
    DELTA = 1


class Model(torch.nn.Module):
    """The next token is a function of the sum of all before it."""

    def compute_logits(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((sums * 7 + 3) % VOCAB, VOCAB).float()


class AsyncEngine:
    """`LLMEngine` and its runner. `budget`: prompt tokens read in a step."""

    def __init__(self, budget: int = 1000) -> None:
        self.budget = budget
        self.requests: dict[str, dict[str, Any]] = {}
        self.queue: deque[list[tuple[str, int]]] = deque()
        worker = SimpleNamespace(
            model_runner=self, is_driver_worker=True, device=torch.device("cuda")
        )
        self.workers = [worker]
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.model, self.kv_caches = Model(), [torch.zeros(4)]
        self.input_batch = SimpleNamespace(req_ids=[])
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))
        self.most = 0
        self.longest = 1000

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> str:
        assert params.ignore_eos
        assert params.temperature == 0
        assert params.output_kind is Kind.DELTA
        assert request_id not in self.requests
        tokens = list(prompt["prompt_token_ids"])
        self.requests[request_id] = {"tokens": tokens, "unread": len(tokens)}
        self.most = max(self.most, len(self.requests))
        return f"{request_id}-0a1b2c3d"

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        for name in request_ids:
            del self.requests[name]

    def step(self) -> list[Any]:
        if self.requests:
            scheduled = SimpleNamespace(total_num_scheduled_tokens=len(self.requests))
            self.queue.appendleft(self.execute_model(scheduled))
            if len(self.queue) < 2:
                return []
        batch = self.queue.pop()
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[token])],
                finished=len(self.requests[name]["tokens"]) >= self.longest,
            )
            for name, token in batch
            if name in self.requests
        ]

    def execute_model(self, scheduled: Any) -> list[tuple[str, int]]:
        left = self.budget
        # not in the order in which they came
        names = sorted(self.requests, reverse=True)
        for row, name in enumerate(names):
            read = min(left, self.requests[name]["unread"])
            self.requests[name]["unread"] -= read
            left -= read
            self.discard_request_mask.np[row] = self.requests[name]["unread"] > 0
        self.input_batch.req_ids = [f"{name}-0a1b2c3d" for name in names]
        sums = torch.tensor([sum(self.requests[name]["tokens"]) for name in names])
        picked = self.model.compute_logits(sums).argmax(-1).tolist()
        made = []
        for row, (name, token) in enumerate(zip(names, picked, strict=True)):
            if not self.discard_request_mask.np[row]:
                self.requests[name]["tokens"].append(token)
                made.append((name, token))
        return made


class AsyncEngineV2(AsyncEngine):
    """The same with the V2 runner, which gives `sample` the batch. It also computes logits of
    prompts, as it does for `prompt_logprobs`.
    """

    def __init__(self, budget: int = 1000) -> None:
        super().__init__(budget)
        del self.discard_request_mask, self.input_batch

    def execute_model(self, scheduled: Any) -> list[tuple[str, int]]:
        left = self.budget
        names = sorted(self.requests, reverse=True)
        for name in names:
            read = min(left, self.requests[name]["unread"])
            self.requests[name]["unread"] -= read
            left -= read
        batch = SimpleNamespace(req_ids=[f"{name}-0a1b2c3d" for name in names])
        sums = torch.tensor([sum(self.requests[name]["tokens"]) for name in names])
        self.model.compute_logits(sums)
        output, _, _ = self.sample(sums, batch, None)
        picked = output.sampled_token_ids[:, 0].tolist()
        made = []
        for name, token in zip(names, picked, strict=True):
            if not self.requests[name]["unread"]:
                self.requests[name]["tokens"].append(token)
                made.append((name, token))
        return made

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar: Any) -> Any:
        picked = self.model.compute_logits(hidden_states).argmax(-1, keepdim=True)
        unread = [self.requests[name[:-9]]["unread"] for name in input_batch.req_ids]
        sampled = torch.tensor([not left for left in unread]).int()
        return SimpleNamespace(sampled_token_ids=picked), sampled, 0 * sampled


def serves_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type=device)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


@pytest.fixture(params=[1000, 7], ids=["whole prompts", "in chunks"])
def budget(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(params=[AsyncEngine, AsyncEngineV2], ids=["V1", "V2"])
def engine(
    request: pytest.FixtureRequest, budget: int, monkeypatch: pytest.MonkeyPatch
) -> VllmEngine:
    inner = request.param(budget)

    def llm(**arguments: Any) -> Any:
        assert arguments["max_num_seqs"] == 3
        assert arguments["gpu_memory_utilization"] == 0.42
        config = SimpleNamespace(get_vocab_size=lambda: VOCAB)

        def collective_rpc(function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
            sent = pickle.loads(pickle.dumps(function))  # as to a worker's process
            return [sent(worker, *args) for worker in inner.workers]

        return SimpleNamespace(
            llm_engine=inner,
            model_config=config,
            arguments=arguments,
            collective_rpc=collective_rpc,
        )

    sampling: Any = ModuleType("vllm.sampling_params")
    sampling.SamplingParams, sampling.RequestOutputKind = SimpleNamespace, Kind
    vllm: Any = ModuleType("vllm")
    vllm.LLM = llm
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    serves_on("cuda", monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made = open_measurable(WORKLOAD, {"enforce_eager": True}, 0.42)
    assert isinstance(made, VllmEngine)
    return made


def expected(prompts: torch.Tensor, steps: int) -> list[list[int]]:
    rows = []
    for prompt in prompts.tolist():
        tokens = list(prompt)
        for _ in range(steps + 1):
            tokens.append((sum(tokens) * 7 + 3) % VOCAB)
        rows.append(tokens[len(prompt) :])
    return rows


def test_every_token_is_counted_though_the_engine_runs_ahead(engine: VllmEngine) -> None:
    prompts = engine.prompts(1)
    decoding = engine.prefill(prompts)
    for steps in (1, 7, 4):
        engine.decode(decoding, steps)
    assert decoding.tokens().tolist() == expected(prompts, 12)
    assert decoding.prefill_s > 0
    assert decoding.decode_s > 0


def test_a_window_leaves_room_for_the_next(engine: VllmEngine) -> None:
    for seed in range(3):
        prompts = engine.prompts(seed)
        assert engine.generate(prompts, 5).tokens.tolist() == expected(prompts, 5)
    inner: Any = engine.runner
    assert inner.requests == {}
    assert inner.most == 3


def test_a_sequence_that_vllm_ended_is_an_error_and_not_waited_for(engine: VllmEngine) -> None:
    inner: Any = engine._engine
    inner.longest = 9
    decoding = engine.prefill(engine.prompts(1))
    engine.decode(decoding, 2)
    with pytest.raises(bench.UsageError, match="takes no longer sequences") as caught:
        engine.decode(decoding, 5)
    assert "--output-len" in str(caught.value.hint)
    engine.release(decoding)
    inner.longest = 1000
    assert engine.generate(engine.prompts(1), 12).tokens.shape == (3, 13)


def test_logits_are_those_over_the_forced_tokens(engine: VllmEngine) -> None:
    engine.generate(engine.prompts(9), 2)
    prompts = engine.prompts(2)
    forced = torch.tensor([[4, 9, 1, 30], [0, 0, 2, 8], [5, 6, 7, 8]])
    logits = engine.served_logits(prompts, forced)
    assert logits.shape == (3, 4, VOCAB)
    whole = torch.cat([prompts, forced], dim=1)
    for column in range(4):
        sums = whole[:, : 5 + column].sum(dim=1)
        assert logits[:, column].argmax(-1).tolist() == ((sums * 7 + 3) % VOCAB).tolist()
    assert bool(logits.isfinite().all())
    # and it decodes by itself again
    assert engine.generate(prompts, 3).tokens.tolist() == expected(prompts, 3)
    assert "compute_logits" not in vars(engine.runner.model)
    assert "sample" not in vars(engine.runner)
    assert "without compilation" in engine.how


def test_logits_come_from_the_first_rank_of_several(engine: VllmEngine) -> None:
    inner: Any = engine._engine
    other = SimpleNamespace(
        model_runner=type(inner)(), is_driver_worker=False, device=torch.device("cuda")
    )
    inner.workers.append(other)
    inner.model_executor = SimpleNamespace()  # workers are processes of their own
    forced = torch.tensor([[4, 9], [0, 2], [5, 6]])
    logits = engine.served_logits(engine.prompts(2), forced)
    assert logits.shape == (3, 2, VOCAB)
    for worker in inner.workers:
        assert worker.patcher_opened == {}
        assert "compute_logits" not in vars(worker.model_runner.model)
    with pytest.raises(bench.UsageError, match="of this process only"):
        delay_of(engine)


class Ranked:
    """An engine whose workers have these patches, as far as an arm looks at it."""

    in_workers = True

    def __init__(self, *ranks: list[Receipt]) -> None:
        self.ranks = ranks

    def on_workers(self, function: Any, *arguments: Any) -> list[list[Receipt]]:
        assert function is worker_receipts
        assert arguments == ("vllm",)
        return [[one.by_rank() for one in own] for own in self.ranks]


def test_calls_are_counted_by_rank_and_a_patch_of_some_ranks_is_not_in() -> None:
    def of(name: str, rank: int, calls: int) -> Receipt:
        counted = {"norm tokens=8": calls}
        return Receipt(patch_id=name, digest="0", pid=1, rank=rank, calls=counted)

    arm = ArmServer.__new__(ArmServer)
    arm.workload = WORKLOAD
    arm.engine = Ranked([of("norm", 0, 4), of("rope", 0, 1)], [of("norm", 1, 3)])  # type: ignore[assignment]
    [found] = arm._receipts()
    assert found.calls == {"rank 0: norm tokens=8": 4, "rank 1: norm tokens=8": 3}
    assert arm._total_calls() == 7


def test_routing_is_not_counted_in_compiled_code(engine: VllmEngine) -> None:
    """It does not call layers; `test_vllm_routing` has the rest."""
    engine._eager = False
    assert engine.routing_entropy_pct(engine.prompts(3), 8) is None


def test_every_process_has_the_model_at_one_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path enters vLLM's hash of what it compiled."""
    monkeypatch.setenv("PATCHER_CACHE", str(tmp_path))
    monkeypatch.setattr(driver, "register_loader", lambda: None)
    monkeypatch.setenv(RANDOM_WEIGHTS, "1")  # it is set, and put back afterwards
    random = WORKLOAD.model_copy(update={"weights": "random"})
    driver._arguments(random)  # transformers imports lazily, and not in several threads at once
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: driver._arguments(random), range(8)))
    assert len({each["model"] for each in made}) == 1
    folder = Path(made[0]["model"])
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_folder_of_weights_is_found_from_any_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    given = WORKLOAD.model_copy(update={"model": "mine", "weights": "local"})
    assert served_model(given) == str(tmp_path / "mine")
    asked = WORKLOAD.model_copy(update={"model": "some/hub-id"})
    assert served_model(asked) == "some/hub-id"


def test_there_is_room_for_other_traffic() -> None:
    shapes = (Shape(batch=64, context=5), Shape(batch=3, context=900))
    plain, roomy = driver._arguments(WORKLOAD), driver._arguments(WORKLOAD, shapes)
    assert (plain["max_num_seqs"], roomy["max_num_seqs"]) == (3, 64)
    assert (plain["max_model_len"], roomy["max_model_len"]) == (3072, 3072)
    far = driver._arguments(WORKLOAD, [Shape(batch=3, context=8192)])
    assert far["max_model_len"] >= 8192 + WORKLOAD.output_len + driver.SPARE_TOKENS
    less = driver._arguments(WORKLOAD, (Shape(batch=1, context=1),))
    assert less == plain


def test_a_model_is_asked_for_no_longer_sequences_than_it_takes(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    small = WORKLOAD.model_copy(update={"model": str(tmp_path)})
    for stated, most in (
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 4096, "model_max_length": 600}, 600),
        ({"n_positions": 1024}, 1024),
        ({}, 3072),
    ):
        config.write_text(json.dumps(stated))
        assert longest(small, ()) == most
    config.write_text(json.dumps({"max_position_embeddings": 512}))
    assert longest(small, [Shape(batch=1, context=600)]) == 612  # for the engine to refuse


@pytest.mark.parametrize(
    ("build", "asked", "said"),
    [
        ("cpu", "cuda", "this build of vLLM is for a CPU"),
        ("cuda", "cpu", "this build of vLLM needs a GPU"),
        ("", "cpu", "this build of vLLM needs a GPU"),  # no platform was found
    ],
)
def test_a_build_for_another_device_is_named(
    build: str, asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    serves_on(build, monkeypatch)
    with pytest.raises(bench.MissingError, match=said):
        open_measurable(WORKLOAD.model_copy(update={"device": asked}), {}, None)


def test_a_planted_delay_is_on_the_device_before_each_forward(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spun: list[int] = []

    class Event:
        """20 million cycles take 10 ms."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = sum(spun)

        def synchronize(self) -> None:
            return

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) / 2e6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append, raising=False)
    prompts = engine.prompts(1)
    with delay_of(engine)(50e-6):
        before = len(spun)
        assert engine.generate(prompts, 5).tokens.tolist() == expected(prompts, 5)
    steps = spun[before:]
    assert len(steps) >= 6
    assert set(steps) == {100_000}
    assert "execute_model" not in vars(engine.runner)
    engine.generate(prompts, 2)
    assert len(spun) == before + len(steps)


def test_dummy_weights_are_refused_with_the_reason() -> None:
    for name in ("dummy", "DUMMY", "LoadFormat.DUMMY"):
        with pytest.raises(bench.UsageError, match="all tokens pick the same experts"):
            refuse_dummy({"load_format": name})
    refuse_dummy({"load_format": "auto"})
    refuse_dummy({})


def test_vllm_is_not_measured_in_one_process() -> None:
    with pytest.raises(bench.UsageError, match="when a process starts") as caught:
        open_engine(WORKLOAD)
    assert "--processes" in caught.value.hint


# ---- from here on: the real vLLM


def greedy() -> Any:
    """As the engine asks."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        max_tokens=10,
        output_kind=RequestOutputKind.DELTA,
    )


@needs_vllm
def test_what_is_called_takes_what_it_is_called_with() -> None:

    # its optional packages may not be installed
    engine = pytest.importorskip("vllm.v1.engine.llm_engine", exc_type=ImportError)
    LLM, LLMEngine = pytest.importorskip("vllm").LLM, engine.LLMEngine
    inspect.signature(LLMEngine.add_request).bind(None, "a", {"prompt_token_ids": [1]}, None)
    inspect.signature(LLMEngine.abort_request).bind(None, ["a"])
    inspect.signature(LLMEngine.step).bind(None)
    for name in ("gpu_model_runner", "gpu.model_runner"):  # V1 and V2
        runner = pytest.importorskip(f"vllm.v1.worker.{name}", exc_type=ImportError)
        inspect.signature(runner.GPUModelRunner.execute_model).bind(None, None, None)
        assert callable(runner.GPUModelRunner.get_model)
    inspect.signature(LLM.__init__).bind(None, model="m", gpu_memory_utilization=0.4)
    parameters = greedy()
    assert parameters.sampling_type.name == "GREEDY"


@needs_vllm
def test_the_output_processor_gives_new_tokens_alone() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(None, log_stats=False)
    parameters = greedy()
    wanted = inspect.signature(EngineCoreRequest).parameters
    fields: dict[str, Any] = dict.fromkeys(wanted)
    fields |= {"request_id": "patcher-0-0a1b2c3d", "external_req_id": "patcher-0"}
    fields |= {"prompt_token_ids": [1, 2], "sampling_params": parameters, "arrival_time": 0.0}
    request = EngineCoreRequest(**fields)
    processor.add_request(request, None, None, 0)
    got: list[int] = []
    for token in (5, 6, 7):
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[token])
        [given] = processor.process_outputs([output]).request_outputs
        assert given.request_id == "patcher-0"
        got += given.outputs[0].token_ids
    assert got == [5, 6, 7]
    # as `LLMEngine.abort_request` calls it
    assert processor.abort_requests(["patcher-0"], internal=False) == [request.request_id]
    assert not processor.has_unfinished_requests()
