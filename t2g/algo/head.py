"""An output head that answers per token instead of handing out logits, so that a batch's logits never exist at once.

For 8 rows of 1,024 tokens and a vocabulary of 128,256 the logits and their float32 softmax would be over 6 GB, more
than all else in the pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from t2g.algo.logprobs import TokenRequest, token_columns


class ChunkedHead(torch.nn.Linear):
    """The linear layer it takes the place of, with the same parameters by the same names.

    While a request stands, its forward of hidden states [S, L, H] returns the request's `token_columns` [S, L, C] and
    the logits exist for one chunk of positions at a time. It is one call of the module all the same: under ZeRO-3 all
    chunks share one fetch of the weight, in the forward and in the backward pass.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)  # not Linear's, which would make new weights
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._request: TokenRequest | None = None

    @contextmanager
    def answering(self, request: TokenRequest) -> Iterator[None]:
        """Calls inside answer `request`, whose positions are [S * L]."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._request is None:
            return super().forward(hidden)
        return token_columns(hidden.flatten(0, 1), self._request, super().forward).unflatten(0, hidden.shape[:2])


def install_chunked_head(model: Any) -> bool:
    """Replace a causal LM's output head by a `ChunkedHead`, in place; call it before DeepSpeed takes the model.

    model: a transformers PreTrainedModel; a weight tied to the embeddings stays tied. False, and nothing is changed,
    where the head is no linear layer or the model does something to the logits after it (Gemma 2 caps them, Granite
    and Cohere scale them): per-token numbers would be taken for logits.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or not _returns_what_the_head_says(model, head):
        return False
    model.set_output_embeddings(ChunkedHead(head))
    return True


class _BackboneOutput:
    """A backbone's output with hidden states and nothing else, by name and by place."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]


@torch.no_grad()
def _returns_what_the_head_says(model: Any, head: torch.nn.Linear) -> bool:
    """Ask the model's own forward, with a backbone and a head that say what we know: no list of models is complete."""
    backbone = model.base_model
    if backbone is model:
        return False
    hidden = torch.zeros(1, 3, head.in_features, dtype=head.weight.dtype)
    said = torch.tensor([[[-40.0], [-0.1], [7.0]]])
    backbone.forward = lambda *args, **kwargs: _BackboneOutput(hidden)
    head.forward = lambda hidden: said
    try:
        returned = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    finally:
        del backbone.forward, head.forward
    return torch.equal(returned, said)
