import kvist
import pytest


@pytest.fixture(scope="session")
def model():
    """The embedded model, with arithmetic that does not depend on what else a step computes."""
    return kvist.Model(deterministic=True)
