"""transformers' Flax Llama with random weights, as the demo runs it: prefill and decode step."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from decode import random_parameters

LAYERS, HEADS, KV_HEADS, DEPTH = 4, 16, 4, 64
VOCABULARY, INTERMEDIATE = 4096, 2816


@dataclass(frozen=True)
class Llama:
    """The model for one dtype and greatest length.

    Attributes:
      length: tokens of the prefill, or positions of the cache.
    """

    length: int
    dtype: Any

    @functools.cached_property
    def module(self) -> Any:
        """The Flax module."""
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLMModule

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HEADS * DEPTH,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=self.length,
        )
        return FlaxLlamaForCausalLMModule(config, dtype=self.dtype)

    def _shapes(self, batch: int, **options: Any) -> Any:
        tokens = jnp.zeros((batch, self.length), jnp.int32)
        init = functools.partial(self.module.init, **options)
        return jax.eval_shape(init, jax.random.key(0), tokens, tokens, tokens)

    def parameter_shapes(self) -> Any:
        """The tree of parameters as `jax.ShapeDtypeStruct`."""
        shapes = self._shapes(1)["params"]
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, self.dtype), shapes)

    def parameters(self, seed: int = 0) -> Any:
        """Random parameters: norms one, matrices so that activations keep their scale."""
        return random_parameters(self.parameter_shapes(), seed)

    def cache(self, batch: int) -> Any:
        """An empty cache."""
        shapes = self._shapes(batch, init_cache=True)["cache"]
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def forward(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Logits `[batch, sequence, vocabulary]` of int32 tokens `[batch, sequence]`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.ones_like(tokens)
        return self.module.apply({"params": params}, tokens, mask, positions).logits

    def step(
        self, params: Any, cache: Any, tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Appends int32 tokens `[batch, n]` at an int32 position.

        Returns:
          logits `[batch, vocabulary]` of the last token, and the cache.
        """
        batch, count = tokens.shape
        positions = jnp.broadcast_to(position + jnp.arange(count), tokens.shape)
        mask = jnp.ones((batch, self.length), jnp.int32)
        output, changed = self.module.apply(
            {"params": params, "cache": cache}, tokens, mask, positions, mutable=["cache"]
        )
        return output.logits[:, -1], changed["cache"]
