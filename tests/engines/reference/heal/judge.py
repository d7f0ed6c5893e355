"""Whether an answer that differs is wrong, or went another way where two tokens are alike but for rounding.

What is computed again shares its batches with others, and sums of floats depend on these.
"""

from __future__ import annotations

import numpy as np
import torch

from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.scheduling.request import Sampling
from tests.engines.reference.heal.serve import Served, engine_of

WRONG = 1e-4  # so far a token is behind the best one, in logits


class Judge:
    """Asks an engine without faults for the logits of answers that others gave."""

    def __init__(self, clean: Served) -> None:
        self._clean, self._engine = clean, engine_of(clean.model)
        self._logits = torch.empty(0)
        forward = self._engine.runner.forward

        def kept(batch: object) -> torch.Tensor:
            self._logits = forward(batch)  # type: ignore[arg-type]
            return self._logits

        self._engine.runner.forward = kept  # type: ignore[method-assign]

    def nearly_right(self, faulty: Served) -> dict[str, float]:
        """Answers that differ and are not wrong: of each the largest lead of a token that was not taken."""
        found = {}
        for name, right in self._clean.answers.items():
            own = faulty.answers[name]
            if own != right and name not in faulty.errors:
                first = next(at for at, (a, b) in enumerate(zip(right, own, strict=True)) if a != b)
                if (behind := self.behind(name, own, first)) < WRONG:
                    found[name] = behind
        return found

    def behind(self, name: str, answer: list[int], first: int) -> float:
        """The largest lead over a token of the answer, from the first on until one is wrong."""
        largest = 0.0
        for at in range(first, len(answer)):
            logits = self._after(np.concatenate([self._clean.prompts[name], answer[:at]]))
            largest = max(largest, float(logits.max() - logits[answer[at]]))
            if largest >= WRONG:
                break
        return largest

    def _after(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> torch.Tensor:
        engine: Engine = self._engine
        engine.add_request(tokens.astype(np.int32), Sampling(max_tokens=1, stop_at_eos=False))
        while engine.has_work():
            engine.step()
        return self._logits[-1]
