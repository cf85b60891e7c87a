"""Head of multi-token prediction: from a token and the hidden state before it to the next token.

    x  = fc([norm_e(embedding of token t + 1); norm_h(h_t)])
    h' = layer(x), logits of token t + 2 = head(norm(h'))

Embedding and output head are the model's. h_t is what the model's output head reads, after the
final norm; for the draft after the next it is norm(h'). Positions are those of the pairs, from 0:
the rotary embedding of a layer depends on their distances alone.

Sources: DeepSeek-V3 (arXiv:2412.19437), section 2.2; transformers 5.24 `modeling_layers.py`
(`MtpLayer`: order of the two, norms, what a second draft reads) and
`generation/candidate_generator.py` (`MTPCandidateGenerator`: hidden states after the final norm)
for DeepSeek-V3 and GLM; vLLM `models/qwen3_5_mtp.py` and llama.cpp pull request 24025 (state after
the final norm) for Qwen3-Next and Qwen3.5; SGLang `models/qwen4_exp_mtp.py` for Qwen4-Exp, see
:class:`~mlx_moeflux.models.qwen4_exp.StreamsHead`. llama.cpp differs for DeepSeek-V3 and GLM: there
the head reads the state before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from mlx_moeflux.cache import SequenceState
from mlx_moeflux.checkpoint.names import MappedTensors, Transform
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.layers import weights_of
from mlx_moeflux.models.modules import Linear, Module, RMSNorm
from mlx_moeflux.models.protocol import Decoder, named_parameters


class PredictionHead(Module):
    """Head of multi-token prediction of a model, which owns it.

    body: Model of the same family with one layer, the head's; its experts, store, state and sizes
    are those of any model. It has neither embedding nor output head.

    Parameters: ``fc.weight [C, 2 C]``, ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``
    ``.weight [C]``, ``model.norm.weight [C]``, ``model.layers.0.*``.
    """

    def __init__(self, model: Decoder, *, num_experts: int | None = None):
        """num_experts: Of the head, by default as many as a layer of the model has."""
        super().__init__()
        config, kind = model.config.prediction(), cast("Any", type(model))
        if num_experts is not None:
            config = replace(config, **{config.EXPERTS_KEY: num_experts})
        k = model.router.num_experts_per_tok
        router = kind.make_router(config, model.kernels, experts_per_token=k)
        body = kind(config, router=router, kernels=model.kernels)
        # A new module is in training mode, which the kernels of both are told.
        body.train(model.training)
        for owner, part in ((body.model, "embed_tokens"), (body, "lm_head")):
            owner.pop(part, None)
        self.model = body.model
        # Closures, since nn.Module would take attributes for child modules.
        self._model: Callable[[], Decoder] = lambda: model
        self._body: Callable[[], Any] = lambda: body
        self.make_fusion(config)

    def make_fusion(self, config: Any) -> None:
        """Create what joins the embedding of a token and the hidden state before it."""
        C, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(2 * C, C, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(C, eps=eps)
        self.pre_fc_norm_hidden = RMSNorm(C, eps=eps)

    @property
    def body(self) -> Any:
        """See the class."""
        return self._body()

    def trunk_bytes(self) -> int:
        """Return the bytes of all parameters; resident experts count once they are set."""
        return sum(array.nbytes for _, array in named_parameters(self))

    def make_cache(self) -> SequenceState:
        """Return an empty state of the head."""
        return self.body.make_cache()

    def entering(self, hidden: mx.array) -> mx.array:
        """Return what the head reads of the output of the model's last layer, ``[B, T, C]``."""
        return self._model().model.norm(hidden)

    def __call__(self, read: mx.array, tokens: mx.array, cache: SequenceState) -> mx.array:
        """Append T pairs to `cache`, and return what the head reads for the pairs after them.

        read: Of :meth:`entering` or of an earlier call, ``[B, T, C]``. tokens: Ids ``[B, T]``,
        each the one behind its `read`. Returns ``[B, T, C]``.
        """
        self.body.feed([tokens], [cache])
        with device.gathered():
            x = self.fuse(self._model().model.embed_tokens(tokens), read)
            return self.leaving(self.body.run_layer(0, x, cache[0]))

    def fuse(self, embedding: mx.array, read: mx.array) -> mx.array:
        """Join embeddings and hidden states, both ``[B, T, C]``."""
        norms = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(read)]
        return self.project(self.fc, mx.concatenate(norms, axis=-1))

    def leaving(self, h: mx.array) -> mx.array:
        """Return what the head reads of its own layer's output, ``[B, T, C]``."""
        return self.model.norm(h)

    def logits(self, read: mx.array) -> mx.array:
        """Return the logits ``[B, T, V]`` of what a call returned."""
        return self._model().kernels.project(read, self._model().head())[0]

    def project(self, linear: Module, x: mx.array) -> mx.array:
        """Return the product of x ``[B, T, in]`` with the matrix of a linear layer."""
        return self._model().kernels.project(x, weights_of(linear))[0]

    def transforms(self, mapped: MappedTensors) -> dict[str, Transform]:
        """Return the functions to apply to trunk tensors after reading, by name."""
        return {}
