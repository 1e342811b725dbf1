"""How the card's tests share it."""
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _give_back_memory() -> Iterator[None]:
    """A worker keeps no memory between tests: a dozen of them share the card with the tests that fill it."""
    yield
    torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin first, so that the others fill the time."""
    items.sort(key=lambda item: "random_problems" not in item.name)
