"""Log-likelihoods of endings by the model of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.errors import CheckpointError, DataError
from tools.evaluation.example import Ending, Example

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer
    from megatron.model.gpt import GPT
    from megatron.model.likelihood import Continuation, Likelihood
    from tools.run_model import SavedModel


@dataclass(frozen=True)
class Scorer:
    """The model of a run with its tokenizer; the weights are loaded when first needed."""

    saved: SavedModel
    tokenizer: Tokenizer
    batch_size: int

    @cached_property
    def _model(self) -> GPT:
        return self.saved.load()

    @property
    def length(self) -> int:
        """Inputs that the model sees at once: the length of the run's sequences."""
        return self.saved.model.seq_length

    @property
    def document_start(self) -> list[int]:
        """Tokens before the first one of a document, as in training.

        The begin mark, if the tokenizer sets one before each text, else the end mark, which ends
        the document before.
        """
        return self.tokenizer.encode("") or [self.tokenizer.eod]

    def score(self, examples: Sequence[Example]) -> tuple[list[list[Likelihood]], int]:
        """Return the likelihood of every ending of every example, and how many examples were cut.

        Contexts lose their beginning where context and ending exceed the length of the run's
        sequences.

        Raises:
            DataError: An ending adds no token or is longer than the run's sequences, or the
                tokenizer is not that of the model.
        """
        wholes = [
            self._tokens(ending, example.where)
            for example in examples
            for ending in example.endings
        ]
        asked = [whole.cut(self.length) for whole in wholes]
        found = iter(self.likelihoods(asked))
        scores = [[next(found) for _ in example.endings] for example in examples]
        was_cut = iter([a.context != w.context for a, w in zip(asked, wholes, strict=True)])
        cut = sum(any([next(was_cut) for _ in example.endings]) for example in examples)
        return scores, cut

    def likelihoods(self, asked: Sequence[Continuation]) -> list[Likelihood]:
        """Return the likelihood of each continuation, none longer than the run's sequences.

        Raises:
            DataError: A token is beyond the vocabulary of the model.
            CheckpointError: The model computes NaN, as weights of a run that diverged do.
        """
        from megatron.model.likelihood import likelihoods

        largest = max(max(*one.context, *one.tokens) for one in asked)
        if largest >= self._model.vocab_size:
            raise DataError(
                f"token {largest}, but the model knows {self._model.vocab_size}; the tokenizer is "
                "not the one it was trained with"
            )
        found = likelihoods(self._model, asked, batch_size=self.batch_size)
        if any(math.isnan(one.log) for one in found):
            raise CheckpointError(f"{self.saved.step}: the model computes NaN; give another step")
        return found

    def _tokens(self, ending: Ending, where: str) -> Continuation:
        """Return the tokens to predict, which the ending adds to its context.

        A token that spans context and ending belongs to the ending.
        """
        from megatron.model.likelihood import Continuation

        try:
            context = self.tokenizer.encode(ending.context)
            whole = self.tokenizer.encode(ending.context + ending.text)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        shared = 0
        while shared < min(len(context), len(whole)) and context[shared] == whole[shared]:
            shared += 1
        if shared == len(whole):
            raise DataError(f"{where}: {ending.text!r} adds no token to its context")
        if len(whole) - shared > self.length:
            raise DataError(
                f"{where}: {len(whole) - shared} tokens are to be predicted, the run's sequences "
                f"have {self.length}"
            )
        return Continuation(
            context=tuple(whole[:shared] or self.document_start), tokens=tuple(whole[shared:])
        )
