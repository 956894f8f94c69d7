"""google-tunix's Llama 3 with random weights: a decode step like that of `flax_llama`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from decode import random_parameters

LAYERS, HEADS, KV_HEADS, DEPTH = 4, 16, 4, 128
VOCABULARY, HIDDEN, INTERMEDIATE = 4096, 1024, 2816


@dataclass(frozen=True)
class Llama:
    """The model for one dtype and length of the cache."""

    length: int
    dtype: Any

    @functools.cached_property
    def _parts(self) -> tuple[Any, Any]:
        from flax import nnx
        from tunix.models.llama3 import model

        config = model.ModelConfig(
            num_layers=LAYERS,
            vocab_size=VOCABULARY,
            embed_dim=HIDDEN,
            hidden_dim=INTERMEDIATE,
            num_heads=HEADS,
            head_dim=DEPTH,
            num_kv_heads=KV_HEADS,
            norm_eps=1e-5,
            rope_theta=500_000,
        )
        return nnx.split(nnx.eval_shape(lambda: model.Llama3(config, rngs=nnx.Rngs(0))))

    def parameter_shapes(self) -> Any:
        """The tree of parameters as `jax.ShapeDtypeStruct`."""
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, self.dtype), self._parts[1])

    def parameters(self, seed: int = 0) -> Any:
        """Random parameters: norms one, matrices so that activations keep their scale."""
        return random_parameters(self.parameter_shapes(), seed)

    def cache(self, batch: int) -> Any:
        """An empty cache."""
        shape = (batch, self.length, KV_HEADS, DEPTH)
        return [{n: jnp.zeros(shape, self.dtype) for n in "kv"} for _ in range(LAYERS)]

    def step(
        self, params: Any, cache: Any, tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Appends int32 tokens `[batch, n]` at an int32 position.

        Returns:
          logits `[batch, vocabulary]` of the last token, and the cache.
        """
        from flax import nnx

        batch, count = tokens.shape
        positions = jnp.broadcast_to(position + jnp.arange(count), tokens.shape)
        mask = jnp.arange(self.length) <= positions[:1, :, None]
        held = {
            f"layer_{n}": {**layer, "end_index": jnp.full((batch,), position)}
            for n, layer in enumerate(cache)
        }
        model = nnx.merge(self._parts[0], params)
        mask = jnp.broadcast_to(mask, (batch, count, self.length))
        logits, changed = model(tokens, positions, held, mask)
        return logits[:, -1], [{n: changed[f"layer_{i}"][n] for n in "kv"} for i in range(LAYERS)]
