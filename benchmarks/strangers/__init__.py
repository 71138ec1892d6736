"""Train steps as people write them with public libraries, to be planned whole.

One module for a library; every public function of a module makes one program: a step, a function
that makes the arguments of one call (state first), and which arguments are donated. Nothing is
allocated until `arguments` is called: `described` gives shapes alone. With `small=True` extents are
a few, for runs on CPU devices; without it they are those of real runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.listed import function


@dataclass(frozen=True)
class Step:
    """A train step: the function, what makes its arguments, and which of these it may overwrite."""

    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = (0,)

    def described(self) -> tuple[Any, ...]:
        """The arguments as shapes and dtypes."""
        import jax

        made: tuple[Any, ...] = jax.eval_shape(self.arguments)
        return made


def make(name: str, small: bool = False) -> Step:
    """The program of a name."""
    made: Step = function("strangers", name, "_steps")(small)
    return made


def random_tokens(n: int, length: int, vocabulary: int, seed: int = 8) -> Any:
    """Random words."""
    import jax

    return jax.random.randint(jax.random.key(seed), (n, length), 0, vocabulary)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over all labels."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def by_optax(tx: Any, build: Any, data: Any, loss: Any) -> Step:
    """A step on plain arrays, which `build` makes; the state holds the optimizer's, too."""
    import jax
    import optax

    def arguments() -> tuple[Any, ...]:
        params = build()
        return (params, tx.init(params)), *data()

    def step(state: Any, *batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)
