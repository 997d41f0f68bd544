"""The choice of the next token from logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from edgemoe.errors import UserError
from edgemoe.grammar.matcher import Matcher
from edgemoe.kv.pictures import words_of
from edgemoe.policy.drawing import DrawRule, Draws

UNLIMITED = sys.maxsize
"""max_new_tokens of an answer that may go on until its context ends."""

MOST_PENALTY = 2.0
"""Largest magnitude of a presence or frequency penalty."""

MOST_BIAS = 10_000.0
"""Largest magnitude of a logit bias: with it a token is chosen always, or never, and float32 stays finite."""

COLD = 1e-4
"""Temperature below which decoding is greedy: logits divided by it would not be finite."""

_RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-MOST_PENALTY, MOST_PENALTY),
    "frequency_penalty": (-MOST_PENALTY, MOST_PENALTY),
    "max_new_tokens": (1, math.inf),
    "min_new_tokens": (0, math.inf),
    "thinking_budget": (0, math.inf),
}
"""Field of Sampling -> its least and its largest value."""


@dataclass(frozen=True)
class Sampling:
    """Settings of an answer: how its tokens are chosen and when it ends.

    Args:
        temperature: a value below COLD stands for greedy decoding, as a top_k or min_p of 1 does.
        top_p: smallest probability mass that is kept; 1 keeps all.
        top_k: largest number of tokens that are kept; 0 keeps all.
        repetition_penalty: 1 for none.
        seed: seed of the random generator; the same seed, prompt and settings give the same answer.
        max_new_tokens: largest number of tokens in an answer; UNLIMITED: what the context holds.
        stop: token ids that end an answer.
        min_p: least probability of a token that is kept, as a fraction of the largest one; 0 keeps all.
        presence_penalty: taken from the logit of each token that the answer has.
        frequency_penalty: the same, once for each time that the answer has it.
        logit_bias: (token id, what is added to its logit), each id once.
        stop_strings: texts that end an answer, and are no part of it.
        top_logprobs: tokens whose log probabilities are kept in addition to the chosen token's; None: none are kept.
        prompt_logprobs: the same for each of the prompt's tokens but the first.
        special_tokens: the text has also tokens of the answer that a tokenizer leaves out of text.
        min_new_tokens: tokens of an answer before which none of `stop` is chosen.
        thinking_budget: most tokens of reasoning, after which its tag is closed; None: no limit.

    Raises:
        UserError: a value out of its range.
    """

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int
    max_new_tokens: int
    stop: frozenset[int]
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    special_tokens: bool = False
    min_new_tokens: int = 0
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (least <= value <= most and math.isfinite(value)):
                wanted = (
                    f"{name} of {least:g} or more" if most == math.inf else f"{name} of {least:g} to {most:g}"
                )
                raise UserError(wanted, f"{value}", "choose one in that range")
        biases = [bias for _, bias in self.logit_bias if not abs(bias) <= MOST_BIAS]
        if biases:
            wanted = f"logit biases of {-MOST_BIAS:g} to {MOST_BIAS:g}"
            raise UserError(wanted, f"{biases[0]}", "choose one in that range")
        if not all(self.stop_strings):
            raise UserError("stop strings of a character or more", "an empty one", "leave it out")
        for top in (self.top_logprobs, self.prompt_logprobs):
            if top is not None and top < 0:
                raise UserError("0 or more top logprobs", f"{top}", "leave them out")

    @property
    def draw_rule(self) -> DrawRule | None:
        """The rule by which tokens are drawn; None: the likeliest one comes, the first where several are."""
        if self.temperature < COLD or self.top_k == 1 or self.top_p == 0 or self.min_p == 1:
            return None
        return DrawRule.of(self.temperature, self.top_k, self.top_p, self.min_p)

    @classmethod
    def of_model(
        cls,
        config: GenerationConfig,
        ends: frozenset[int],
        *,
        temperature: float | None,
        top_p: float | None,
        seed: int,
        max_new_tokens: int,
    ) -> Sampling:
        """Returns the settings of a model's generation config, overridden by the given values.

        Args:
            config: the generation config of the model.
            ends: ids of the tokens that end an answer (models.ends).
            temperature: None: the model's, 0 where its config does not sample.
            top_p: None: the model's.
            seed, max_new_tokens: see Sampling.
        """

        def own(name: str, absent: float) -> float:
            """The config's value, which may be 0; `absent` where it has none."""
            value = getattr(config, name)
            return absent if value is None else float(value)

        samples = bool(config.do_sample)
        if temperature is None:
            temperature = own("temperature", 1.0) if samples else 0.0
        return cls(
            temperature=temperature,
            top_p=top_p if top_p is not None else own("top_p", 1.0) if samples else 1.0,
            top_k=max(int(own("top_k", 0)), 0) if samples else 0,  # -1 keeps all tokens too
            min_p=own("min_p", 0.0) if samples else 0.0,
            repetition_penalty=own("repetition_penalty", 1.0),
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=ends,
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities of one token, by the model itself: before temperature, penalties and biases.

    Args:
        token: id.
        logprob: its log probability.
        top: (id, logprob) of the likeliest tokens, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, logits: torch.Tensor, token: int, top: int) -> TokenLogprobs:
        """Takes them from float32 logits [vocab]."""
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(min(top, len(logprobs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return cls(token, float(logprobs[token]), tuple(pairs))


class PromptScores:
    """Log probabilities of a prompt's tokens but the first, as its rows come.

    Args:
        tokens: ids of the prompt.
        top: number of likeliest tokens to keep for each token.
    """

    def __init__(self, tokens: Sequence[int], top: int) -> None:
        self._tokens, self._top = tuple(tokens), top
        self.logprobs: list[TokenLogprobs] = []

    def add(self, first: int, logits: torch.Tensor) -> None:
        """Takes logits [rows, vocab] after the tokens from `first` on."""
        following = self._tokens[first + 1 :]
        self.logprobs += [
            TokenLogprobs.of(row, token, self._top) for row, token in zip(logits, following, strict=False)
        ]


class Sampler:
    """Chooses tokens, with the random state of one conversation.

    Args:
        sampling: settings.
        matcher: restricts the tokens of one answer by a grammar; None: nothing does.

    Attributes:
        draws: the random numbers, and the rule that a token is drawn by.
    """

    def __init__(self, sampling: Sampling, matcher: Matcher | None = None) -> None:
        self.sampling, self._matcher = sampling, matcher
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.logit_bias:
            bias = {(token,): float(value) for token, value in sampling.logit_bias}
            self._processors.append(SequenceBiasLogitsProcessor(bias))
        if matcher:
            self._processors.append(matcher)
        self.draws = Draws(sampling.draw_rule, sampling.seed)

    def changed(self, sampling: Sampling) -> Sampler:
        """Returns a sampler with other settings; with the same seed, it continues from this random state."""
        other = Sampler(sampling)
        if sampling.seed == self.sampling.seed:
            other.draws = self.draws.changed(sampling.draw_rule)
        return other

    def next(self, tokens: Sequence[int], logits: torch.Tensor, new: int = 0) -> int:
        """Chooses the token after `tokens`.

        Args:
            tokens: ids of prompt and answer so far.
            logits: float32 [vocab]; not changed.
            new: number of the last tokens that are the answer's.

        Raises:
            UserError: the grammar is too complex to follow, or no token is left.
        """
        token = self._chosen(tokens, logits, new)
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """Goes on after the next token of the answer, which the caller may have set.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        if self._matcher:
            self._matcher.take(token)

    def allowed(self, guesses: Sequence[int]) -> Sequence[int]:
        """Returns the first of some guesses at the next tokens, as far as the grammar allows them.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        return self._matcher.first_allowed(guesses) if self._matcher else guesses

    def _chosen(self, tokens: Sequence[int], logits: torch.Tensor, new: int) -> int:
        scores = self._penalised(logits, tokens[len(tokens) - new :])
        if new < self.sampling.min_new_tokens and self.sampling.stop:
            scores = scores.index_fill(0, torch.tensor(sorted(self.sampling.stop)), -torch.inf)
        if self._processors:
            scores = self._processors(torch.tensor([words_of(tokens)]), scores.unsqueeze(0))[0]
        if scores.max() == -torch.inf:
            raise self._no_token()
        rule = self.draws.rule
        return rule.draw(scores, self.draws.next()) if rule else int(scores.argmax())

    def _no_token(self) -> UserError:
        """The error for settings that leave no token."""
        settings = ["its grammar"] if self._matcher else []
        settings += ["min_new_tokens"] if self.sampling.min_new_tokens else []
        found = f"none: {' and '.join(settings) or 'its settings'} forbid all"
        return UserError("a next token that a request allows", found, "change the request")

    def _penalised(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Subtracts the presence and frequency penalties, which transformers does not have."""
        presence, frequency = self.sampling.presence_penalty, self.sampling.frequency_penalty
        if not answer or not (presence or frequency):
            return logits
        ids, counts = torch.tensor(answer).unique(return_counts=True)
        scores = logits.clone()
        scores[ids] -= presence + frequency * counts
        return scores
