"""The rate of a GPU's matrix products, to hold other rates against, and how benchmarks tell their figures."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tell(**figures: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(figures), flush=True)


def timed(work: Callable[[], Any], device: str) -> float:
    """Seconds that a piece of work takes on the device."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def product_rates(device: str) -> dict[str, float]:
    """8192 x 8192 x 8192 in bf16 on random numbers, TFLOP/s: of the first ten, which a cool chip does faster, and of the 1500 after them."""
    size = 8192 if device == "cuda" else 256
    a, b, out = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(3))

    def rate(count: int) -> float:
        seconds = timed(lambda: [torch.mm(a, b, out=out) for _ in range(count)], device) / count
        return 2 * size**3 / seconds / 1e12

    rate(3)
    return {"first_ten": rate(10), "tflops": rate(1500 if device == "cuda" else 10)}


def products(device: str) -> Iterator[dict[str, float]]:
    """`product_rates`, measured and told each time they are asked for."""
    while True:
        figures = product_rates(device)
        tell(side="products", **{name: round(rate) for name, rate in figures.items()})
        yield figures
