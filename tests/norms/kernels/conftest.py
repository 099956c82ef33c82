"""Here each test says itself which implementation it runs."""

import pytest


@pytest.fixture(autouse=True)
def implementation():
    return None
