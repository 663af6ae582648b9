"""Each patch point of transformers: in, counted, fallen back from, compiled, out, built later."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import transformers
from feature_matrix import feature
from patch_sample import LAYERS, TINY, evaluation, state
from transformers import StaticCache
from transformers.models.gpt_oss import modeling_gpt_oss as source
from transformers_sample import GPT_OSS

from patcher import bench
from patcher.bench import Candidate, Language
from patcher.bench.engines import Engine, open_engine
from patcher.integrate import CallCounters, Patch, prepare
from patcher.integrate.activation import guards_of
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.transformers.points import GptOssDecoderLayers, GptOssExpertsFunction
from patcher.integrate.transformers.roles.experts_rows import weigh_and_sum
from patcher.integrate.transformers.roles.gpt_oss_decoder_layer import _add_then_norm
from patcher.integrate.transformers.roles.gpt_oss_rotary import _rotate
from patcher.integrate.transformers.roles.gpt_oss_router import _top_k

STEPS = 3
PER_LAYER = {name: 2 if name == "gpt_oss.decoder_layer" else 1 for name in GPT_OSS}
ORIGINALS: dict[str, Callable[..., object]] = {
    "fused_add_rms_norm": _add_then_norm,
    "moe_reduce": weigh_and_sum,
    "rope": _rotate,
    "moe_topk": _top_k,
}
Decoded = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Patch]:
    """One a patch point, of the library's own solutions in torch."""
    made = {}
    for name, point in GPT_OSS.items():
        op = bench.load_op(point.op)
        file = op.folder / "solutions" / "cpu_torch" / f"{op.name}.py"
        text = file.read_text() if file.is_file() else f"def {op.name}(*args): ...\n"
        candidate = Candidate(op=op.name, language=Language.TORCH, source=text)
        found = evaluation(candidate).model_copy(update={"op": op.name, "language": "torch"})
        folder = tmp_path_factory.mktemp(op.name) / "patch"
        made[name] = Patch.create(
            folder, op, candidate, found, engine="transformers", made_by="test"
        )
    return made


def decode(run: Any, model: Any, prompts: torch.Tensor) -> Decoded:
    """Greedy tokens and logits with a static cache."""
    with torch.inference_mode():
        cache = StaticCache(config=model.config, max_cache_len=16)
        logits = [run(prompts, past_key_values=cache, use_cache=True).logits]
        tokens = [logits[0][:, -1:].argmax(-1)]
        for _ in range(STEPS):
            logits.append(run(tokens[-1], past_key_values=cache, use_cache=True).logits)
            tokens.append(logits[-1][:, -1:].argmax(-1))
        return torch.cat(tokens, 1), torch.cat(logits, 1)


def same(one: Decoded, other: Decoded) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def by_tokens(book: CallCounters) -> Counter[str]:
    """Calls by the size of their first axis alone."""
    found: Counter[str] = Counter()
    for label, count in book.calls.items():
        found[next(word for word in label.split() if word.startswith("tokens="))] += count
    return found


def dispatcher(patch: Patch, *, tokens: int | None = None) -> Dispatcher:
    """The engine's own arithmetic as the kernel, for float32 and that many tokens at most."""
    guards = guards_of(patch.manifest)
    single = tuple(
        choice
        for choice in guards.dtypes
        if {kind for kind in choice.values() if kind.is_floating_point} == {torch.float32}
    )
    axes = {**guards.axes, "tokens": AxisBounds(maximum=tokens)}
    guards = dataclasses.replace(guards, dtypes=single, axes=axes)
    op = patch.manifest.op
    return Dispatcher(op, ORIGINALS[op], guards, CallCounters(patch.manifest.id, patch.digest))


@contextmanager
def inside(point: Any, kernel: Dispatcher) -> Iterator[CallCounters]:
    point.install(kernel)
    try:
        yield kernel.book
    finally:
        point.remove()


@feature("`generate`, batches, a cache", "right", *GPT_OSS)
@pytest.mark.parametrize("name", GPT_OSS)
def test_a_patch_that_is_the_original_changes_no_bit(
    engine: Engine, patches: dict[str, Patch], name: str
) -> None:
    model: Any = engine.model
    clean, prompts = state(model), engine.prompts(1)
    before = decode(model, model, prompts)
    with prepare(model, patches[name], kernel=ORIGINALS[GPT_OSS[name].op]) as book:
        assert state(model) != clean
        assert same(decode(model, model, prompts), before)
    assert state(model) == clean
    assert same(decode(model, model, prompts), before)
    calls = PER_LAYER[name] * LAYERS
    assert by_tokens(book) == {"tokens=16": calls, "tokens=2": STEPS * calls}
    assert not book.fallbacks


@pytest.mark.parametrize("name", [name for name in GPT_OSS if name != "gpt_oss.decoder_layer"])
def test_the_librarys_own_solution_serves_the_same_model(
    engine: Engine, patches: dict[str, Patch], name: str
) -> None:
    model: Any = engine.model
    prompts = engine.prompts(2)
    before = decode(model, model, prompts)
    with prepare(model, patches[name]) as book:
        after = decode(model, model, prompts)
    assert torch.equal(after[0], before[0])
    assert torch.allclose(after[1], before[1], atol=1e-5)
    assert book.calls.total() == PER_LAYER[name] * LAYERS * (STEPS + 1)


@feature("another dtype or shape", "falls back", *GPT_OSS)
@pytest.mark.parametrize("name", GPT_OSS)
def test_a_shape_or_dtype_that_is_not_supported_runs_the_original(
    engine: Engine, patches: dict[str, Patch], name: str
) -> None:
    model: Any = engine.model
    prompts, calls = engine.prompts(1), PER_LAYER[name] * LAYERS
    before = decode(model, model, prompts)
    with inside(GPT_OSS[name](model), dispatcher(patches[name], tokens=4)) as book:
        assert same(decode(model, model, prompts), before)
    assert by_tokens(book) == {"tokens=2": STEPS * calls}
    assert book.fallbacks == {"tokens above 4": calls}
    narrow: Any = copy.deepcopy(model).bfloat16()
    before = decode(narrow, narrow, prompts)
    with inside(GPT_OSS[name](narrow), dispatcher(patches[name])) as book:
        assert same(decode(narrow, narrow, prompts), before)
    assert not book.calls
    [(reason, count)] = book.fallbacks.items()
    assert reason.startswith("dtype bfloat16")
    assert count == (STEPS + 1) * calls


def is_patched(module: Any) -> bool:
    return hasattr(module, "patch_point") or "forward" in module.__dict__


def built() -> Any:
    """Two layers, a sliding and a full one."""
    config = {**bench.preset(TINY.model).config, "num_hidden_layers": 2}
    return transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**config)).eval()


@pytest.fixture(scope="module")
def small() -> Any:
    return built()


@feature("`torch.compile` with a static cache", "right", *GPT_OSS)
def test_compiled_with_a_static_cache_all_points_run_and_go(
    engine: Engine, small: Any, patches: dict[str, Patch]
) -> None:
    prompts, layers = engine.prompts(1), small.config.num_hidden_layers
    step = torch.compile(small, fullgraph=True, backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]

    def run(tokens: torch.Tensor, **more: Any) -> Any:
        # the prompt eagerly, as `generate` does
        return (small if tokens.shape[1] > 1 else step)(tokens, **more)

    try:
        plain = decode(run, small, prompts)
        points = {name: point(small) for name, point in GPT_OSS.items()}
        first = {name: dispatcher(patches[name]) for name in GPT_OSS}
        narrow = {name: dispatcher(patches[name], tokens=0) for name in GPT_OSS}
        made = []
        for kernels in (first, first, narrow):
            with ExitStack() as stack:
                for name, point in points.items():
                    stack.enter_context(inside(point, kernels[name]))
                after = decode(run, small, prompts)
            assert torch.equal(after[0], plain[0])
            assert torch.allclose(after[1], plain[1], atol=1e-5)
            assert same(decode(run, small, prompts), plain)
            made.append(graphs["unique_graphs"])
        assert made[0] == made[1] < made[2], "what was in before is not compiled again"
        for name in GPT_OSS:
            calls = PER_LAYER[name] * layers
            ran, fell = first[name].book, narrow[name].book
            assert by_tokens(ran) == {"tokens=16": 2 * calls, "tokens=2": 2 * STEPS * calls}
            assert not ran.fallbacks
            assert not fell.calls
            assert fell.fallbacks == {"tokens above 0": (1 + STEPS) * calls}
    finally:
        torch._dynamo.reset()


@feature("compiled in parts", "falls back", "gpt_oss.decoder_layer")
def test_what_is_compiled_in_parts_or_watched_runs_the_original(
    engine: Engine, small: Any, patches: dict[str, Patch]
) -> None:
    prompts, body = engine.prompts(1), small.model
    seen: list[torch.Tensor] = []
    compiled: Any = torch.compile(small, backend="eager")
    layer: Any = torch.compile(body.layers[1], backend="eager")
    kernel = dispatcher(patches["gpt_oss.decoder_layer"])
    try:
        with torch.inference_mode():
            rotary = body.rotary_emb(body.embed_tokens(prompts), torch.arange(8)[None])
            alone = {"hidden_states": body.embed_tokens(prompts), "position_embeddings": rotary}
            before = body.layers[1](**alone)
            states = small(prompts, output_hidden_states=True).hidden_states
            with inside(GptOssDecoderLayers(small), kernel) as book:
                assert torch.equal(layer(**alone), before)
                later = compiled(prompts, output_hidden_states=True).hidden_states
                assert all(torch.equal(a, b) for a, b in zip(states, later, strict=True))
                handle = body.layers[0].register_forward_hook(lambda m, a, out: seen.append(out))
                torch._dynamo.reset()
                compiled(prompts, use_cache=False)
                handle.remove()
        assert torch.equal(seen[0], states[1])
        assert set(book.fallbacks) == {
            f"{reason}, when it was compiled"
            for reason in (
                "a layer is called on its own, or by several threads at a time",
                "hidden states are being recorded",
                "a module has hooks",
            )
        }
    finally:
        torch._dynamo.reset()


@feature("`deepcopy`, `pickle`: a model of its own, without the patch", "right", *GPT_OSS)
def test_copies_and_pickles_of_a_patched_model_are_transformers_own(
    engine: Engine, patches: dict[str, Patch]
) -> None:
    prompts, small = engine.prompts(1), built()
    before = decode(small, small, prompts)
    with ExitStack() as stack:
        books = [
            stack.enter_context(inside(point(small), dispatcher(patches[name])))
            for name, point in GPT_OSS.items()
        ]
        for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
            other.lm_head.weight.data *= 2  # a model of its own
            found = decode(other, other, prompts)
            assert torch.equal(found[1], before[1] * 2)
        assert not any(book.calls for book in books)


def test_models_that_are_built_later_are_patched_until_it_is_taken_out(
    engine: Engine, patches: dict[str, Patch]
) -> None:
    prompts = engine.prompts(1)
    constructor, before = source.GptOssModel.__init__, built()
    points = [point() for point in GPT_OSS.values()]
    kernels = [dispatcher(patches[name]) for name in GPT_OSS]
    for point, kernel in zip(points, kernels, strict=True):
        assert "from now on" in point.find()
        point.install(kernel)
        with pytest.raises(bench.UsageError, match="already installed"):
            point.install(kernel)
    model = built()
    assert isinstance(model.model, source.GptOssModel)
    with torch.inference_mode():
        model.load_state_dict(before.state_dict())
        found = model(prompts).logits
        assert torch.equal(found, before(prompts).logits)
    calls = {name: PER_LAYER[name] * 2 for name in GPT_OSS}
    assert {n: k.book.calls.total() for n, k in zip(GPT_OSS, kernels, strict=True)} == calls
    for point in (*points[1::2], *points[0::2]):  # in any order
        point.remove()
        point.remove()
    assert source.GptOssModel.__init__ is constructor
    assert not any(map(is_patched, model.modules()))
    with torch.inference_mode():
        assert torch.equal(model(prompts).logits, found)


@feature("models built later, in any way", "right", "gpt_oss.decoder_layer")
@pytest.mark.parametrize(
    "build",
    [transformers.GptOssForCausalLM, transformers.GptOssModel, transformers.AutoModel.from_config],
)
def test_a_model_is_patched_however_it_is_built(
    patches: dict[str, Patch], build: Callable[..., Any]
) -> None:
    config = built().config
    with inside(GptOssDecoderLayers(), dispatcher(patches["gpt_oss.decoder_layer"])) as book:
        model = build(config).eval()
        with torch.inference_mode():
            model(torch.arange(1, 5)[None])
    assert book.calls.total() == 2 * 2
    assert not any(map(is_patched, model.modules()))


def test_a_model_that_is_gone_is_not_kept(patches: dict[str, Patch]) -> None:
    with inside(GptOssDecoderLayers(), dispatcher(patches["gpt_oss.decoder_layer"])):
        body = weakref.ref(built().model)
        gc.collect()
        assert body() is None


def test_a_constructor_or_a_function_of_someone_else_is_left_alone(
    patches: dict[str, Patch], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = source.GptOssModel.__init__

    def theirs(*args: Any) -> None:
        own(*args)

    with monkeypatch.context() as other:
        other.setattr(source.GptOssModel, "__init__", theirs)
        with pytest.raises(bench.VerificationError, match="by other code"):
            prepare(None, patches["gpt_oss.decoder_layer"], kernel=_add_then_norm)
    point, kernel = GptOssDecoderLayers(), dispatcher(patches["gpt_oss.decoder_layer"])
    point.install(kernel)
    with monkeypatch.context() as other:
        model, over = built(), source.GptOssModel.__init__
        other.setattr(source.GptOssModel, "__init__", lambda *args: over(*args))
        with pytest.raises(bench.VerificationError, match="by other code"):
            point.remove()
        assert not any(map(is_patched, (*model.modules(), *built().modules())))
    source.GptOssModel.__init__ = own
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    functions["grouped_mm"] = lambda *args: args[1]
    try:
        for target in (None, built()):
            with pytest.raises(bench.VerificationError, match="by other code"):
                GptOssExpertsFunction(target).install(dispatcher(patches["gpt_oss.experts"]))
    finally:
        del functions["grouped_mm"]
