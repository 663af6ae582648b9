"""The head and the greedy choice as one kernel, in both of vLLM's model runners."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from feature_matrix import feature
from vllm_here import config, dispatcher, guards_of, needs_vllm, patched, shipped

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.survey import survey
from patcher.integrate.vllm.points import POINTS
from patcher.integrate.vllm.roles.deferred_logits import DeferredLogits

__all__ = ("config",)  # a fixture of tests here

pytestmark = needs_vllm

POINT = "lm_head.greedy"
ROWS, HIDDEN, VOCAB = 4, 64, 1500
READ = "logits that something else reads"


class Model:
    """What a runner has as its model: a head with a padded vocabulary, and its logits."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.float32)
        self.head.weight.data.normal_()
        self.head.weight.data[VOCAB:] = 100.0  # padding, which is no token
        self.logits = LogitsProcessor(VOCAB)
        self.bias: torch.Tensor | None = None
        self.after: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(self.logits(self.head, hidden, self.bias))


@pytest.fixture
def heads(config: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of the engine's own head, by their rows."""
    from vllm.model_executor.layers import utils, vocab_parallel_embedding

    calls: list[int] = []

    def product(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
        calls.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(utils, "default_unquantized_gemm", product)
    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda *_, **__: product)
    for name in ("dispatch_unquantized_gemm", "default_unquantized_gemm"):
        if hasattr(vocab_parallel_embedding, name):
            monkeypatch.setattr(vocab_parallel_embedding, name, getattr(utils, name))
    torch.manual_seed(5)
    return calls


def kernel_of() -> Dispatcher:
    return shipped("lm_head_argmax", T=torch.float32, I=torch.int64)


def picks(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = hidden @ model.head.weight.data[:VOCAB].T
    return product.argmax(1)


# model runner V2


class Step:
    """One call of runner V2's own `sample`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.gpu.sample import sampler

        self.model, self.hidden = Model(), torch.randn(ROWS + 3, HIDDEN)
        self.grammar: Any = None
        self.seen: list[torch.Tensor] = []

        def gumbel(logits: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            assert type(logits) is torch.Tensor
            self.seen.append(logits)
            return logits.argmax(1)

        monkeypatch.setattr(sampler, "gumbel_sample", gumbel)
        counts = torch.ones(ROWS, dtype=torch.int32)
        monkeypatch.setattr(sampler, "get_num_sampled_and_rejected", lambda *_: (counts, counts))
        own = self.sampler = sampler.Sampler.__new__(sampler.Sampler)
        own.use_flashinfer = own.use_xpu_sampler = own.use_fp64_gumbel = own.compute_nans = False
        own.logprobs_mode, own.return_sampling_mask = "raw_logprobs", False
        own.trace_replay_state = None
        self.temperature = np.zeros(ROWS, dtype=np.float32)
        self.logprobs = np.full(ROWS, sampler.NO_LOGPROBS)
        self.changes = np.zeros(ROWS, dtype=bool)
        versions = inspect.signature(sampler.apply_top_k_top_p).parameters
        own.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(
                np=self.temperature, gpu=torch.from_numpy(self.temperature)
            ),
            seeds=SimpleNamespace(gpu=torch.zeros(ROWS, dtype=torch.int64)),
            get_top_k_top_p=lambda *_: (None,) * (3 if "has_topp_only_rows" in versions else 2),
            any_greedy=lambda _: True,
            any_explicit_seed=lambda _: False,
            max_num_logprobs=lambda requests: int(self.logprobs[requests].max()),
        )
        own.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda _: 0)
        own.apply_sampling_params = lambda given, *rest, **more: given
        own.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=counts))
        nothing = np.zeros(ROWS, dtype=bool)
        if "needs_logits_processing" in inspect.getsource(sampler.Sampler):
            own.needs_logits_processing = self.changes
        else:
            own.logit_bias_state = SimpleNamespace(use_logit_bias=nothing)
            own.penalties_state = SimpleNamespace(use_penalty=self.changes)
            own.bad_words_state = SimpleNamespace(num_bad_words=SimpleNamespace(np=nothing))
        runner = self.runner = model_runner.GPUModelRunner.__new__(model_runner.GPUModelRunner)
        runner.model, runner.sampler, runner.rejection_sampler = self.model, own, None
        runner.batch_sharder, runner.speculator = None, None
        runner.structured_outputs_worker = SimpleNamespace(apply_grammar_bitmask=self._mask)
        places = torch.arange(ROWS) + 2
        self.batch = SimpleNamespace(
            logits_indices=places,
            num_draft_tokens=0,
            num_reqs=ROWS,
            idx_mapping=torch.arange(ROWS),
            idx_mapping_np=np.arange(ROWS),
            expanded_idx_mapping=torch.arange(ROWS),
            expanded_local_pos=torch.zeros(ROWS),
            cu_num_logits=torch.arange(ROWS + 1),
            cu_num_logits_np=np.arange(ROWS + 1),
            positions=torch.arange(ROWS + 3),
            input_ids=torch.arange(ROWS + 3),
            seq_lens=torch.ones(ROWS, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.ones(ROWS, dtype=torch.int32),
        )

    @staticmethod
    def _mask(logits: torch.Tensor, batch: Any, requests: Any, bitmask: torch.Tensor) -> None:
        logits.masked_fill_(bitmask, -torch.inf)

    def run(self) -> torch.Tensor:
        output, _, _ = self.runner.sample(self.hidden, self.batch, self.grammar)
        assert output.logprobs_tensors is None
        sampled: torch.Tensor = output.sampled_token_ids
        assert sampled.shape == (ROWS, 1)
        assert sampled.dtype == torch.int64
        return sampled.squeeze(1)

    @property
    def largest(self) -> torch.Tensor:
        return picks(self.model, self.hidden[self.batch.logits_indices])


@pytest.fixture
def step(heads: list[int], monkeypatch: pytest.MonkeyPatch) -> Step:
    return Step(monkeypatch)


@feature("model runner V2", "right", POINT)
def test_runner_v2_has_the_kernel_choose_and_computes_no_logits(
    step: Step, heads: list[int]
) -> None:
    own, kernel = step.run(), kernel_of()
    assert torch.equal(own, step.largest)
    assert heads == [ROWS]
    with patched(POINT, kernel) as point:
        assert torch.equal(step.run(), own)
        assert (heads, len(step.seen)) == ([ROWS], 1)
        label = f"lm_head_argmax tokens={ROWS} hidden={HIDDEN} vocab={VOCAB} float32/int64"
        assert dict(kernel.book.calls) == {label: 1}
        assert not kernel.book.fallbacks
        # the log probabilities of a prompt, and a draft's own head
        assert type(step.model.compute_logits(step.hidden)) is torch.Tensor
        seen = survey(point, kernel.guards, [step.model.logits, step.model.head])
        assert (seen.taken, seen.total) == (1, 1)
    assert torch.equal(step.run(), own)
    assert heads == [ROWS, ROWS + 3, ROWS]


def at_random(step: Step) -> None:
    step.temperature[2] = 1.0


def with_logprobs(step: Step) -> None:
    step.sampler.logprob_token_ids_state.max_num_token_ids = lambda _: 0
    step.sampler.return_sampling_mask = True


def changed(step: Step) -> None:
    step.changes[1] = True


def by_grammar(step: Step) -> None:
    mask = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
    mask[torch.arange(ROWS), step.largest] = True
    step.grammar = SimpleNamespace(
        structured_output_request_ids=[], grammar_bitmask=mask, num_acceptable_drafts=None
    )


def drafted(step: Step) -> None:
    step.batch.num_draft_tokens = 1


def counting(step: Step) -> None:
    step.sampler.compute_nans = True


def derived(step: Step) -> None:
    kind = type(step.sampler)
    step.sampler.__class__ = type("Sampler", (kind,), {})


def sharded(step: Step) -> None:
    step.runner.batch_sharder = object()


@feature("greedy and random requests in one batch", "falls back", POINT)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (at_random, "a request that samples at random"),
        (changed, "logits that a request changes"),
        (by_grammar, "a grammar"),
        (drafted, "tokens of a draft"),
        (derived, "another sampler"),
    ],
)
def test_what_a_step_of_runner_v2_wants_besides_stays_the_engines(
    step: Step,
    heads: list[int],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Step], None],
    reason: str,
) -> None:
    from vllm.v1.worker.gpu import model_runner

    monkeypatch.setattr(model_runner, "grammar_invalid_drafts", lambda *_: None, raising=False)
    change(step)
    own, kernel = step.run(), kernel_of()
    assert torch.equal(own, step.largest) == (change is not by_grammar)
    with patched(POINT, kernel):
        assert torch.equal(step.run(), own)
    assert heads == [ROWS, ROWS]
    assert dict(kernel.book.fallbacks) == {reason: 1}
    assert not sum(kernel.book.calls.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (counting, "counts of NaN"),
        (with_logprobs, "log probabilities"),
        (sharded, "sampling that ranks share"),
    ],
)
def test_what_reads_logits_after_the_choice_is_asked_before(
    step: Step, change: Callable[[Step], None], reason: str
) -> None:
    """Without their own readers, which need a GPU or more ranks."""
    from patcher.integrate.vllm.roles.plain_sampling import wanted_of_v2

    assert wanted_of_v2(step.runner, step.batch, None) is None
    change(step)
    assert wanted_of_v2(step.runner, step.batch, None) == reason
    step.logprobs[0] = 3
    assert wanted_of_v2(step.runner, step.batch, None) in (reason, "log probabilities")


def without_the_first_hundred(logits: torch.Tensor) -> torch.Tensor:
    logits[:, :100] = -torch.inf
    return logits


@pytest.mark.parametrize(
    "after",
    [
        without_the_first_hundred,
        lambda logits: -logits,
        lambda logits: torch.cat([logits, logits + 1], 1),
        lambda logits: logits[..., 7:],
    ],
)
def test_a_model_that_goes_on_with_its_logits_has_them(
    step: Step, heads: list[int], after: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    step.model.after = after
    own, kernel = step.run(), kernel_of()
    with patched(POINT, kernel):
        assert torch.equal(step.run(), own)
    assert heads == [ROWS, ROWS]
    assert set(kernel.book.fallbacks) == {READ}
    assert not sum(kernel.book.calls.values())


def biased(model: Model) -> None:
    model.bias = torch.randn(len(model.head.weight))


def capped(model: Model) -> None:
    model.logits.soft_cap = 30.0


def scaled(model: Model) -> None:
    model.logits.scale = -1.0


def shared(model: Model) -> None:
    model.logits._gather_logits = lambda logits: logits
    model.head.tp_size = 2


def quantised(model: Model) -> None:
    kind = type(model.head.quant_method)
    model.head.quant_method.__class__ = type("Fp8Method", (kind,), {})


def adapted(model: Model) -> None:
    kind = type(model.logits)
    model.logits.__class__ = type("LogitsProcessorWithLoRA", (kind,), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (biased, "a head with a bias"),
        (capped, "logits that are capped or scaled"),
        (scaled, "logits that are capped or scaled"),
        (shared, "a vocabulary that ranks share"),
        (quantised, "weights by Fp8Method"),
        (adapted, "logits by LogitsProcessorWithLoRA"),
    ],
)
def test_heads_that_are_no_plain_product_stay_the_engines(
    step: Step, heads: list[int], change: Callable[[Model], None], reason: str
) -> None:
    change(step.model)
    own, kernel = step.run(), kernel_of()
    with patched(POINT, kernel) as point:
        assert torch.equal(step.run(), own)
        refused = point.applies(step.model.logits)
    assert heads == [ROWS, ROWS]
    assert dict(kernel.book.fallbacks) == {reason: 1}
    assert refused in (None, reason)


def test_a_call_beyond_the_guards_is_computed_after_all(step: Step, heads: list[int]) -> None:
    own = step.run()
    guards = guards_of("lm_head_argmax", T=torch.bfloat16, I=torch.int64)
    kernel = dispatcher("lm_head_argmax", lambda *_: None, guards)
    with patched(POINT, kernel):
        assert torch.equal(step.run(), own)
    assert heads == [ROWS, ROWS]
    assert dict(kernel.book.fallbacks) == {"dtype float32/int64": 1}


# model runner V1


RUNNER = """
def execute_model(self, scheduler_output, intermediate_tensors=None):
    self.logits = self.model.compute_logits(self.hidden)
"""


class StepV1:
    """The two calls of runner V1: its own `Sampler`, and of `execute_model` the one line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.sample import sampler
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.worker import gpu_model_runner

        kind = gpu_model_runner.GPUModelRunner
        place = {"__name__": gpu_model_runner.__name__}
        exec(compile(RUNNER, str(gpu_model_runner.__file__), "exec"), place)
        monkeypatch.setattr(kind, "execute_model", place["execute_model"])
        platform = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False)
        monkeypatch.setattr(sampler, "current_platform", platform, False)
        self.sampler = sampler.Sampler.__new__(sampler.Sampler)
        torch.nn.Module.__init__(self.sampler)
        self.sampler.logprobs_mode = "raw_logprobs"
        self.runner = kind.__new__(kind)
        self.model = self.runner.model = Model()
        self.runner.hidden = torch.randn(ROWS, HIDDEN)
        self.output = SimpleNamespace(
            has_structured_output_requests=False, scheduled_spec_decode_tokens={}
        )
        none = torch.empty(0)
        self.metadata = SamplingMetadata(
            temperature=None,
            all_greedy=True,
            all_random=False,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        self.runner.input_batch = SimpleNamespace(sampling_metadata=self.metadata)
        self.between: Callable[[torch.Tensor], None] = lambda logits: None

    def run(self) -> torch.Tensor:
        self.runner.execute_model(self.output)
        self.between(self.runner.logits)
        result = self.sampler(logits=self.runner.logits, sampling_metadata=self.metadata)
        sampled: torch.Tensor = result.sampled_token_ids
        assert sampled.shape == (ROWS, 1)
        assert sampled.dtype == torch.int32
        return sampled.squeeze(1).long()

    @property
    def largest(self) -> torch.Tensor:
        return picks(self.model, self.runner.hidden)


@pytest.fixture
def step_v1(heads: list[int], monkeypatch: pytest.MonkeyPatch) -> StepV1:
    return StepV1(monkeypatch)


@feature("model runner V1", "right", POINT)
def test_runner_v1_has_the_kernel_choose_and_computes_no_logits(
    step_v1: StepV1, heads: list[int]
) -> None:
    from vllm.v1.sample.logits_processor import builtin

    idle = builtin.LogitBiasLogitsProcessor.__new__(builtin.LogitBiasLogitsProcessor)
    idle.biases = {}
    step_v1.metadata.logitsprocs.non_argmax_invariant.append(idle)
    own, kernel = step_v1.run(), kernel_of()
    assert torch.equal(own, step_v1.largest)
    with patched(POINT, kernel):
        assert torch.equal(step_v1.run(), own)
        assert heads == [ROWS]
        assert sum(kernel.book.calls.values()) == 1
        assert not kernel.book.fallbacks
    assert torch.equal(step_v1.run(), own)


def random_too(step: StepV1) -> None:
    step.metadata.all_greedy = False
    step.metadata.temperature = torch.zeros(ROWS)
    step.sampler.topk_topp_sampler = lambda logits, *_: (logits.argmax(1), None)


def logprobs(step: StepV1) -> None:
    step.metadata.logprob_token_ids = {0: [1]}
    step.sampler.gather_specific_token_logprobs = lambda *_: None


def allowed(step: StepV1) -> None:
    mask = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
    mask[torch.arange(ROWS), step.largest] = True
    step.metadata.allowed_token_ids_mask = mask


def bad_words(step: StepV1) -> None:
    step.metadata.bad_words_token_ids = {0: [[int(step.largest[0])]]}
    step.metadata.output_token_ids = [[] for _ in range(ROWS)]


def penalties(step: StepV1) -> None:
    step.metadata.no_penalties = False
    step.sampler.apply_penalties = lambda logits, *_: -logits


def processor(step: StepV1) -> None:
    own = SimpleNamespace(apply=lambda logits: -logits)
    step.metadata.logitsprocs.non_argmax_invariant.append(own)


def bias(step: StepV1) -> None:
    from vllm.v1.sample.logits_processor import builtin

    made = builtin.LogitBiasLogitsProcessor.__new__(builtin.LogitBiasLogitsProcessor)
    made.biases = {0: {3: 1e4}}
    made.logits_slice = (torch.tensor([0]), torch.tensor([3]))
    made.bias_tensor = torch.tensor([1e4])
    step.metadata.logitsprocs.non_argmax_invariant.append(made)


def grammar(step: StepV1) -> None:
    step.output.has_structured_output_requests = True
    mask_largest(step)


def mask_largest(step: StepV1) -> None:
    at = torch.arange(ROWS), step.largest

    def between(logits: torch.Tensor) -> None:
        logits[at] = -torch.inf

    step.between = between


def drafts(step: StepV1) -> None:
    step.output.scheduled_spec_decode_tokens = {"a": [1]}


CHANGED = "logits that a request changes"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (random_too, "a request that samples at random"),
        (logprobs, "log probabilities"),
        (allowed, CHANGED),
        (bad_words, CHANGED),
        (penalties, CHANGED),
        (processor, CHANGED),
        (bias, CHANGED),
        (grammar, "a grammar"),
        (mask_largest, READ),  # by something that no part announces
        (drafts, "tokens of a draft"),
    ],
)
def test_what_a_step_of_runner_v1_wants_besides_stays_the_engines(
    step_v1: StepV1, heads: list[int], change: Callable[[StepV1], None], reason: str
) -> None:
    change(step_v1)
    own, kernel = step_v1.run(), kernel_of()
    same = change in (random_too, logprobs, drafts)
    assert torch.equal(own, step_v1.largest) == same
    with patched(POINT, kernel):
        assert torch.equal(step_v1.run(), own)
    assert heads == [ROWS, ROWS]
    assert dict(kernel.book.fallbacks) == {reason: 1}
    assert not sum(kernel.book.calls.values())


def test_a_request_that_joins_between_the_two_calls_counts(
    step_v1: StepV1, heads: list[int]
) -> None:
    def joins(logits: torch.Tensor) -> None:
        allowed(step_v1)

    step_v1.between = joins
    own, kernel = step_v1.run(), kernel_of()
    step_v1.metadata.allowed_token_ids_mask = None
    with patched(POINT, kernel):
        assert torch.equal(step_v1.run(), own)
    assert heads == [ROWS, ROWS]
    assert not sum(kernel.book.calls.values())
    assert dict(kernel.book.fallbacks) == {CHANGED: 1}


# with other points


def test_it_and_the_greedy_sampler_exclude_each_other(heads: list[int]) -> None:
    other = shipped("sample_argmax", T=torch.float32, I=torch.int64)
    for first, kernel, second in (
        (POINT, kernel_of(), "sampler.greedy"),
        ("sampler.greedy", other, POINT),
    ):
        said = r"Sampler\.sample is already patched"
        with patched(first, kernel), pytest.raises(VerificationError, match=said):
            POINTS[second]().find()
        assert POINTS[second]().find()


# the logits themselves


def deferred() -> tuple[DeferredLogits, torch.Tensor, list[str]]:
    true, said = torch.randn(3, 5), list[str]()

    def compute() -> torch.Tensor:
        said.append("computed")
        return true

    return DeferredLogits.of(true, true, compute, lambda: said.append("read")), true, said


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape,
        lambda x: x.dtype,
        lambda x: x.device,
        lambda x: x.data_ptr(),
        lambda x: x.stride(),
        lambda x: x.numpy().tolist(),
        lambda x: x.argmax(1).tolist(),
        lambda x: x[1:].tolist(),
        lambda x: torch.stack([x, x]).tolist(),
        lambda x: torch.nn.functional.softmax(x, dim=-1).tolist(),
        lambda x: torch.ops.aten.sum.default(x).item(),
        lambda x: (x + x).tolist(),
        lambda x: (1 - x).tolist(),
        lambda x: torch.empty_like(x).shape,
        lambda x: torch.empty(3, 5).copy_(x).tolist(),
        lambda x: len(x),
        lambda x: [each.tolist() for each in x],
        repr,
    ],
)
def test_whatever_is_asked_of_deferred_logits_is_the_logits(use: Callable[[Any], Any]) -> None:
    logits, true, said = deferred()
    assert logits.untouched
    assert said == []
    assert use(logits) == use(true)
    assert said == ["read", "computed"]
    assert not logits.untouched


def test_what_is_written_to_deferred_logits_stays_written() -> None:
    logits, true, said = deferred()
    logits[0, 2] = 9.0
    logits.masked_fill_(torch.ones(3, 5, dtype=torch.bool).triu(3), -torch.inf)
    assert true[0, 2] == 9.0
    assert true[0, 4] == -torch.inf
    assert logits.compute() is true
    assert said.count("computed") == 1
