import pathlib

import gguf
import openai
import pytest
from server import EMBEDDED, Server

HERE = pathlib.Path(__file__).resolve().parent


def client_of(server, key="none"):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=600)


def served(*args):
    server = Server(*args)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def plain():
    """The embedded model, which has no chat template."""
    yield from served("--context", 8192, "--deterministic")


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    """The embedded model with a chat template that teaches the Hermes format."""
    path = tmp_path_factory.mktemp("model") / "hermes.gguf"
    template = (HERE / "hermes.jinja").read_text()
    path.write_bytes(gguf.with_text(EMBEDDED.read_bytes(), "tokenizer.chat_template", template))
    yield from served("--model", path, "--name", "hermes", "--context", 8192)


@pytest.fixture(scope="session")
def keyed(tmp_path_factory):
    """Two keys, and room for one running and one waiting request."""
    path = tmp_path_factory.mktemp("config") / "kvist.toml"
    path.write_text("""
        [scheduler]
        max_batch = 1
        [limits]
        max_queue = 1
        [[keys]]
        name = "ann"
        key = "ann-secret"
        [[keys]]
        name = "ops"
        key = "ops-secret"
        admin = true
    """)
    yield from served("--config", path)


@pytest.fixture
def client(plain):
    return client_of(plain)


@pytest.fixture
def tools(tool_model):
    return client_of(tool_model)
