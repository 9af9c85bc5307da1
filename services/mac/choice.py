"""One answer being written: its sampler, what it chose so far, and the logits it chooses from next.

Several choices of a request continue the same prompt in the same sequence: one at a time is in the layers, the others
are parked as the rows they added and the recurrent state they reached. Rows are copied, never computed again, so a
choice is the answer a request of its own with its seed would get. Used by services.mac.turn and services.mac.lane.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.ggml.logits import LogitBias, logprobs
from common.ggml.sampler import RANDOM_SEED, Sampler
from common.state.recurrent import RecurrentSnapshot
from common.wire import messages as m
from common.wire.rows import RowSection

EndReason = Literal["stop", "length", "cancelled"]


class Choice:
    """Choice `index` of a request. `close` it at the end."""

    def __init__(self, index: int, ask: m.Generate, n_vocab: int) -> None:
        """Raises EngineError for sampling values that make no sense."""
        self.index = index
        self.generated: list[int] = []
        self.logits: NDArray[np.float32] | None = None
        """f32 [n_vocab] of the newest token that went through the model; None before the prompt is read."""
        self.stopped = False
        """A stop token was chosen."""
        self.ended: EndReason | None = None
        self.parked: list[RowSection] | None = None
        """The rows of `generated` and the state after them, while another choice is in the layers."""
        self._ask = ask
        seed = (ask.sampling.seed + index) % RANDOM_SEED if index else ask.sampling.seed
        self._bias = LogitBias(ask.sampling.logit_bias, n_vocab)
        self._sampler = Sampler(msgspec.structs.replace(ask.sampling, seed=seed), n_vocab)

    def choose(self) -> m.TokenReady | None:
        """The next token, to be sent; None when it is a stop token. Raises EngineError for logits that are damaged."""
        assert self.logits is not None
        logits = self._bias.apply(self.logits)
        token_id = self._sampler.sample(logits)
        if token_id in self._ask.stop_token_ids:
            self.stopped = True
            return None
        self.generated.append(token_id)
        told = None
        if self._ask.top_logprobs is not None:
            found = logprobs(logits, token_id, self._ask.top_logprobs)
            told = m.TokenLogprobs(found.chosen, found.top)
        return m.TokenReady(self._ask.request_id, len(self.generated) - 1, token_id, self.index, told)

    def park(self, whole: Any, n_prompt: int) -> None:
        """Copy what this choice added to the layers of the span `whole`."""
        self.parked = whole.export_rows(n_prompt, whole.n_valid, kv=True, state=True)

    def unpark(self, whole: Any, prompt: RecurrentSnapshot) -> None:
        """Put the layers back to the end of the prompt, and then to where this choice was."""
        whole.restore(prompt)
        if (
            self.parked is not None and len(self.generated) > 1
        ):  # the newest token has not been through the layers
            whole.import_rows(self.parked, prompt.n_valid + len(self.generated) - 1)
        self.parked = None

    def close(self) -> None:
        """Free the sampler."""
        self._sampler.close()
