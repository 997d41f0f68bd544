"""The choice of the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """Settings of an answer: how its tokens are chosen and when it ends.

    Args:
        temperature: 0 for greedy decoding.
        top_p: smallest probability mass that is kept; 1 keeps all.
        top_k: largest number of tokens that are kept; 0 keeps all.
        repetition_penalty: 1 for none.
        seed: of the random generator; the same seed, prompt and settings give the same answer.
        max_new_tokens: largest number of tokens in an answer.
        stop: token ids that end an answer.
    """

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int
    max_new_tokens: int
    stop: frozenset[int]

    @classmethod
    def of_model(
        cls,
        config: GenerationConfig,
        eos: int | None,
        *,
        temperature: float | None,
        top_p: float | None,
        seed: int,
        max_new_tokens: int,
    ) -> Sampling:
        """Returns the settings of a model's generation config, overridden by the given values.

        Args:
            config: of the model.
            eos: the tokenizer's end-of-sequence id; None: it has none.
            temperature: None: the model's, 0 where its config does not sample.
            top_p: None: the model's.
            seed, max_new_tokens: as in Sampling.
        """
        ends = config.eos_token_id
        stop = {ends} if isinstance(ends, int) else set(ends or ())
        samples = bool(config.do_sample)
        if temperature is None:
            temperature = float(config.temperature or 1.0) if samples else 0.0
        return cls(
            temperature=temperature,
            top_p=top_p if top_p is not None else float((config.top_p if samples else None) or 1.0),
            top_k=int((config.top_k if samples else None) or 0),
            repetition_penalty=float(config.repetition_penalty or 1.0),
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=frozenset(stop | ({eos} if eos is not None else set())),
        )


class Sampler:
    """Chooses tokens, with the random state of one conversation."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature > 0:
            if sampling.temperature != 1:
                self._processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))

    def changed(self, sampling: Sampling) -> Sampler:
        """Returns a sampler with other settings; with the same seed, it continues from this random state."""
        other = Sampler(sampling)
        if sampling.seed == self.sampling.seed:
            other._generator.set_state(self._generator.get_state())
        return other

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """Chooses the token after `tokens` from float32 logits [vocab]."""
        scores = self._processors(torch.tensor([tokens]), logits.unsqueeze(0))[0]
        if self.sampling.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
