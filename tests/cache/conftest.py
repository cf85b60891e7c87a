import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def seeded():
    mx.random.seed(7)
