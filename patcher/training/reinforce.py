"""Reinforcement learning: GRPO or RLOO of TRL, rewarded by the judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import fmean
from typing import Any, ClassVar, Literal

from patcher.bench import UsageError
from patcher.training.choice import in_rounds
from patcher.training.environment import EnvironmentOptions, KernelEnvironment
from patcher.training.folder import Deadline, TrainingFolder, TrainingOptions
from patcher.training.replies import SHARES, JudgedReply, SampledReply
from patcher.training.reply_judges import AskedReply, ReplyJudges
from patcher.training.trl import completion_text
from patcher.training.updates import Told, UpdateWriter, run_updates, shared_arguments
from patcher.training.weights import LoadedModel, LoraOptions


class ReinforceOptions(TrainingOptions):
    """What is trained, and how; see `patcher train reinforce --help`."""

    FREE: ClassVar[frozenset[str]] = frozenset({"updates", "save_every"})
    model: str
    adapter: str | None = None
    """Its `adapter_digest`."""
    language: str
    ops: tuple[str, ...]
    method: Literal["grpo", "rloo"] = "grpo"
    updates: int = 200
    updates_per_round: int = 1
    """Updates from one sampling."""
    tasks_per_update: int = 2
    replies_per_task: int = 8
    batch: int = 4
    """Replies that go through the model at once when it is trained."""
    prompt_tokens: int = 2560
    reply_tokens: int = 1024
    temperature: float = 1.0
    learning_rate: float = 3e-5
    lora: LoraOptions = LoraOptions()
    seed: int = 0
    save_every: int = 10
    scale: str = "milestones"
    against: tuple[str, ...] = ("eager",)


def fitting_prompts(
    environment: EnvironmentOptions,
    ops: Sequence[str],
    loaded: LoadedModel,
    prompt_tokens: int,
    reply_tokens: int,
    say: Callable[[str], None],
) -> dict[str, str]:
    """The prompt of each op whose prompt fits, with a reply in the model's context, too; none is
    cut off.

    Args:
        say: is told how many fit.

    Raises:
        UsageError: none fits.
    """
    context = getattr(loaded.model.config, "max_position_embeddings", prompt_tokens + reply_tokens)
    tokens = min(prompt_tokens, context - reply_tokens)
    asked = KernelEnvironment(environment)
    prompts = {op: asked.reset(op) for op in ops}
    sizes = {op: loaded.token_count(prompt) for op, prompt in prompts.items()}
    fit = {op: prompt for op, prompt in prompts.items() if sizes[op] <= tokens}
    if not fit:
        raise UsageError(
            f"no prompt fits in {tokens} tokens: the shortest has {min(sizes.values())}",
            f"raise --prompt-tokens; prompt and reply together have {context}",
        )
    say(f"{len(fit)} of {len(ops)} prompts fit in {tokens} tokens")
    return fit


class Rollouts:
    """The reward function, and what it saw of the update."""

    def __init__(
        self, judges: ReplyJudges, prompts: dict[str, str], longest: int, deadline: Deadline
    ) -> None:
        self._judges, self._prompts, self._longest = judges, prompts, longest
        self._deadline = deadline
        self.samples: list[SampledReply] = []
        """Those that were judged."""
        self._ops: Sequence[str] = ()
        self._tokens: list[int] = []
        self._times = (0.0, 0.0)

    def rewards(
        self, writer: UpdateWriter, folder: TrainingFolder
    ) -> Callable[..., list[float | None]]:
        """For TRL, which leaves a reply out of the update whose reward is None."""

        def patcher_reward(
            completions: Sequence[Any],
            op: Sequence[str],
            completion_ids: Sequence[Sequence[int]],
            trainer_state: Any,
            **_: Any,
        ) -> list[float | None]:
            begun = time.monotonic()
            texts = [completion_text(each) for each in completions]
            asked = [AskedReply(name, text) for name, text in zip(op, texts, strict=True)]
            found = self._judges.judge_most(asked, lambda *_: None, self._deadline)
            self._times = (begun - writer.begun_s, time.monotonic() - begun)
            self._ops, self._tokens = op, [len(ids) for ids in completion_ids]
            self.samples = [
                SampledReply(
                    number=trainer_state.global_step + 1,
                    prompt=self._prompts[each.op],
                    reply=each.reply,
                    tokens=tokens,
                    judged=judged,
                )
                for each, tokens, judged in zip(asked, self._tokens, found, strict=True)
                if isinstance(judged, JudgedReply)
            ]
            folder.samples.append(self.samples)
            return [each.reward.value if isinstance(each, JudgedReply) else None for each in found]

        return patcher_reward

    def measured(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Of the update, for its line of metrics; each sampling is in the line of one."""
        if not self._ops:
            return {"tokens": 0}
        counts = self._counted()
        self.samples, self._ops, self._tokens, self._times = [], (), [], (0.0, 0.0)
        return counts

    def _counted(self) -> dict[str, Any]:
        judged = [each.judged for each in self.samples]
        by_op: dict[str, set[float]] = {}
        for each in judged:
            by_op.setdefault(each.op, set()).add(each.reward.value)
        generating, judging = self._times
        counts: dict[str, Any] = {
            "tokens": sum(self._tokens),
            "generating_s": round(generating, 3),
            "judging_s": round(judging, 3),
            "replies": len(self._ops),
            "cut_off": fmean(tokens >= self._longest for tokens in self._tokens),
            "lost": sum(each.lost for each in judged),
            "unjudged": len(self._ops) - len(judged),
            "skipped_tasks": len(set(self._ops) - set(by_op)),
        }
        if not judged:
            return counts
        return counts | {
            "reward": fmean(each.reward.value for each in judged),
            "shares": {name: fmean(each.flags()[name] for each in judged) for name in SHARES},
            "flat_tasks": fmean(len(values) == 1 for values in by_op.values()),
        }


def reinforce(
    folder: TrainingFolder,
    options: ReinforceOptions,
    loaded: LoadedModel,
    judges: ReplyJudges,
    prompts: dict[str, str],
    deadline: Deadline,
    told: Told,
) -> None:
    """Train until the asked number of updates is done.

    Args:
        loaded: the model with the adapter that is trained.
        prompts: by op.

    Raises:
        BudgetError: the time limit came first; the same command goes on.
        PatcherError: the judge cannot judge here.
    """
    trl, datasets = import_module("trl"), import_module("datasets")
    rollouts = Rollouts(judges, prompts, options.reply_tokens, deadline)
    rounds = options.updates_per_round
    writer = UpdateWriter(folder, options.updates, deadline, told, rollouts.measured, rounds)
    ops = in_rounds(list(prompts), options.updates * options.tasks_per_update, options.seed)
    size = options.tasks_per_update * options.replies_per_task
    shared = shared_arguments(
        folder, options.updates, options.learning_rate, options.seed, options.save_every, rounds
    )
    kind = options.method.upper()
    config = getattr(trl, f"{kind}Config")(
        **shared,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=size // options.batch,
        generation_batch_size=size * rounds,
        num_generations=options.replies_per_task,
        max_completion_length=options.reply_tokens,
        temperature=options.temperature,
        shuffle_dataset=False,  # `in_rounds` did, so that a resumed training finds its place
        beta=0.0,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=loaded.model,
        args=config,
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": loaded.prompt(prompts[op]), "op": op} for op in ops]
        ),
        processing_class=loaded.tokenizer,
        reward_funcs=rollouts.rewards(writer, folder),
        callbacks=[writer],
    )
    run_updates(trainer, folder, options.updates, deadline)
