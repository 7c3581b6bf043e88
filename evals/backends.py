"""What runs the requests of an evaluation: the library's own loop, or anything that keeps the same records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dspark.drafter import Drafter
from dspark.evals.settings import EvalSettings, describe_drafter, describe_target
from dspark.loop import generate
from dspark.records import Generation
from dspark.sampling import SamplingParams
from dspark.schedule import describe_schedule, parse_schedule
from dspark.target import HFTarget

OnFinish = Callable[[int, Generation], None]
VERIFICATION = "standard rejection sampling"


class Backend(Protocol):
    """Generates for prompts, and says with what.

    Attributes:
        tokenizer: the target's, from transformers; it formats the prompts.
    """

    @property
    def tokenizer(self) -> Any: ...

    def describe(self) -> dict[str, Any]:
        """What the figures depend on beside the settings, ready for JSON.

        Returns:
            backend: name, and not_reported, the fields of `StepRecord` that stay empty.
            options: the settings that the models decide: num_draft_tokens (0 without a drafter) and drafting. None
                where they are not known.
            target, drafter: the models; drafter None for plain decoding.
            verification: in words.
        """
        ...

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], on_finish: OnFinish
    ) -> list[Generation]:
        """One `Generation` per prompt; on_finish(index, generation) as soon as each ends."""
        ...


@dataclass(frozen=True)
class LoopBackend:
    """The library's own loop, `dspark.generate`."""

    target: HFTarget
    drafter: Drafter | None
    settings: EvalSettings

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def describe(self) -> dict[str, Any]:
        """See `Backend`; nothing is left out of its records."""
        num_draft_tokens, schedule = 0, None
        if self.drafter is not None:
            num_draft_tokens = self.settings.num_draft_tokens or self.drafter.config.max_draft_tokens
            schedule = describe_schedule(self.settings.schedule)
        return {
            "backend": {"name": "dspark", "not_reported": []},
            "options": {"num_draft_tokens": num_draft_tokens, "schedule": schedule},
            "target": describe_target(self.target),
            "drafter": None if self.drafter is None else describe_drafter(self.drafter),
            "verification": VERIFICATION,
        }

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], on_finish: OnFinish
    ) -> list[Generation]:
        """`dspark.generate` with the run's settings."""
        return generate(
            self.target,
            self.drafter,
            prompts,
            params,
            num_draft_tokens=None if self.drafter is None else self.settings.num_draft_tokens,
            drafting=self.settings.drafting,
            draft_truncation=self.settings.draft_truncation,
            schedule=None if self.drafter is None else parse_schedule(self.settings.schedule),
            max_batch_size=self.settings.batch_size,
            on_finish=on_finish,
        )
