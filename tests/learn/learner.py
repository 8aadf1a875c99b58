"""Group the compiled functions of a policy and of a critic, for tests of updates."""

import functools

import jax.numpy as jnp

from rsearch.learn import update
from rsearch.models.lora import make_merge


class Counted:
    """A loss that counts its calls; it is only called while it is traced."""

    def __init__(self, loss):
        self.loss = loss
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return self.loss(*args)


class Learner:
    """`make_policy_scorer`, `make_policy_update` and a merge with the same settings."""

    def __init__(self, model, optimizer, mesh, *, loss, **settings):
        names = ("temperature", "chunk_tokens", "adapter_scale")
        reading = {n: settings[n] for n in names if n in settings}
        self.mesh, self.scale = mesh, settings.get("adapter_scale", 1.0)
        self.loss = Counted(loss)
        self._score = update.make_policy_scorer(model, mesh, **reading)
        self._update = update.make_policy_update(
            model, optimizer, mesh, loss=self.loss, **settings
        )
        # With offloaded moments, a program of its own computes only the gradient.
        self.gradients = update.make_policy_update(
            model, optimizer, mesh, loss=loss, **settings | {"offloads": True}
        ).gradients
        self.merge = functools.partial(make_merge, mesh, self.scale)

    @property
    def num_traces(self):
        return self.loss.calls // 2  # called for its shapes and for its gradient

    def put(self, batch):
        return update.put(batch, self.mesh)

    def score(self, params, batch, base=None):
        return self._score(params, base, batch)

    def update(self, state, batch, memory=None, base=None):
        policy, metrics = self._update(state._replace(critic=None), base, batch, memory)
        return policy._replace(critic=state.critic), metrics

    def plain(self, params, base=None, *, dtype=jnp.float32):
        return params if base is None else self.merge(jnp.dtype(dtype))(base, params)

    def left(self, params, base=None):
        merge = self.merge(jnp.dtype(jnp.float32), donates=True)
        return params if base is None else merge(base, params)


class Critic:
    """`make_value_scorer` and `make_value_update` with the same settings."""

    def __init__(self, model, optimizer, mesh, *, loss, **settings):
        scale = settings.get("adapter_scale", 1.0)
        self.loss = Counted(loss)
        self._score = update.make_value_scorer(model, mesh, adapter_scale=scale)
        self._update = update.make_value_update(
            model, optimizer, mesh, loss=self.loss, **settings
        )

    @property
    def num_traces(self):
        return self.loss.calls // 2  # called for its shapes and for its gradient

    def score(self, params, batch, base=None):
        return self._score(params, base, batch)

    def update(self, state, batch, base=None):
        return self._update(state, base, batch)
