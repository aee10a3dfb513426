import pytest
from fleet import Router, Worker

POLICIES = {"vllm-router": "kv_aware", "smg": "cache_aware"}


@pytest.fixture
def start(tmp_path):
    """Starts a router in front of three workers; all end with the test."""
    running = []

    def start(kind, policy=None, *flags):
        workers = []
        for _ in range(3):
            workers.append(Worker(tmp_path, None, *flags))
            running.append(workers[-1])
        router = Router(kind, policy or POLICIES[kind], workers, tmp_path)
        running.append(router)
        return router

    yield start
    for process in running:
        process.process.kill()
        process.process.wait()


@pytest.fixture(params=POLICIES)
def kind(request):
    return request.param


@pytest.fixture
def router(kind, start):
    return start(kind)
