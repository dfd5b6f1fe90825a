"""Settled timing.

A GPU at its power cap runs at a clock that what ran just before decides: kernels timed in short
bursts mislead by up to 15 %. So each figure is taken the same way: 0.3 s of one large matrix
product, as between attention calls in training, then 0.3 s of the kernel itself until the clock has
settled, then 0.2 s of it timed as one block with CUDA events, all enqueued without a pause. Compare
within one run only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flash_attn.cli.measure import calls_for, time_block


@dataclass(frozen=True)
class Recipe:
    """Seconds of each phase. On a CPU: no product, and the fastest of three timed blocks."""

    product: float = 0.3
    settle: float = 0.3
    timed: float = 0.2

    def describe(self, device: torch.device) -> str:
        if device.type != "cuda":
            return f"{self.settle} s warm-up, the fastest of 3 blocks of {self.timed} s"
        before = f"{self.product} s 8192^3 bf16 product, {self.settle} s of the kernel"
        return f"{before}, {self.timed} s timed as one block"


def recipe_of(phases: str) -> Recipe:
    """Of "PRODUCT,SETTLE,TIMED" in seconds; "" is the usual one."""
    return Recipe(*(float(x) for x in phases.split(","))) if phases else Recipe()


QUICK = Recipe(product=0.02, settle=0.02, timed=0.02)


class Timer:
    """``timer(fn)`` -> seconds a call."""

    def __init__(self, device: torch.device, recipe: Recipe = Recipe()):
        self.device, self.recipe = device, recipe
        if device.type == "cuda":
            self._a, self._b = (
                torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2)
            )
            self._c = torch.empty_like(self._a)
            self._products = calls_for(self._product, device, recipe.product)

    def _product(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def products(self) -> None:
        """Enqueues the first phase; nothing on a CPU."""
        if self.device.type == "cuda":
            for _ in range(self._products):
                self._product()

    def __call__(self, fn: Callable[[], object]) -> float:
        recipe, device = self.recipe, self.device
        timed = calls_for(fn, device, recipe.timed)
        settle = max(1, round(timed * recipe.settle / recipe.timed))
        if device.type != "cuda":
            for _ in range(settle):
                fn()
            return min(time_block(fn, device, timed) for _ in range(3))
        self.products()
        for _ in range(settle):
            fn()
        return time_block(fn, device, timed)
