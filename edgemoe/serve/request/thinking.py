"""How much an answer may reason: a number of tokens, or an effort, which is a share of the answer's most tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from edgemoe.serve.request.fields import NO_LIMIT, Whole
from edgemoe.serve.request.sampling import SamplingRequest

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Words for how much a model reasons."""

SHARES: dict[str, float | None] = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.5,
    "high": 0.8,
    "xhigh": 0.95,
    "max": None,
}
"""Effort -> the share of the answer's most tokens that reasoning may have; None: no limit."""

Budget = Annotated[Whole, Field(ge=NO_LIMIT)]
"""Most tokens of reasoning; 0: none, NO_LIMIT: any number."""


class ThinkingFields(SamplingRequest):
    """How much an answer reasons."""

    reasoning_effort: Effort | None = None
    thinking_budget: Annotated[
        Budget | None,
        Field(
            validation_alias=AliasChoices(
                "thinking_budget", "thinking_budget_tokens", "thinking_token_budget"
            )
        ),
    ] = None

    def effort(self) -> Effort | None:
        """The effort that the request has under any name; None: it has none."""
        return self.reasoning_effort

    def explicit_budget(self) -> int | None:
        """The budget that the request has under any name; None: it has none."""
        return self.thinking_budget

    def switched_on(self) -> bool | None:
        """Whether the request turns reasoning on or off, under any name; None: it says nothing of it."""
        return None

    def reasoning_budget(self, limit: int, default: int | None = None) -> int | None:
        """Most tokens of reasoning; None: no limit.

        Args:
            limit: most tokens of the answer.
            default: the server's budget, for requests that have none; None: no limit. If it is 0, a request that turns
                reasoning on has no limit.
        """
        given, effort = self.explicit_budget(), self.effort()
        if given is None and effort is not None:
            share = SHARES[effort]
            return None if share is None else max(int(share * limit), 1) if share else 0
        if given is None:
            given = NO_LIMIT if default == 0 and self.switched_on() else default
        return None if given == NO_LIMIT else given

    def thinking_variables(self, default: int | None = None) -> dict[str, object]:
        """Variables for the chat template: the effort and the budget, for templates that know them."""
        given, budget = dict[str, object](), self.explicit_budget()
        if (effort := self.effort()) is not None:
            given["reasoning_effort"] = effort
        if budget is not None and budget > 0:
            given["thinking_budget"] = budget
        return given | ({"enable_thinking": False} if self.reasoning_budget(1 << 30, default) == 0 else {})
