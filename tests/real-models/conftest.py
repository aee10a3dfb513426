import json

import decoded
import kvist
import llama
import llama_server
import numpy as np
import pytest
from fetch import CACHE, MODELS

lines = []


@pytest.fixture(scope="session")
def report():
    """`report(line)` is shown when all is done: figures are worth reading where nothing failed, too."""
    return lines.append


def pytest_terminal_summary(terminalreporter):
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session", params=list(MODELS), ids=lambda name: name.split("-")[0])
def model(request):
    """The file of a model that kvist runs."""
    path = CACHE / request.param
    kvist.run("plan", path, "--context", "64")
    return path


@pytest.fixture(scope="session")
def rival(model):
    """llama.cpp with the model as people run it: f16 for K and V, weights repacked, flash attention where it likes."""
    with llama.Model(model) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def prompts(rival):
    """The questions as tokens; of a model with a chat template, as one would ask it."""
    from prompts import QUESTIONS

    template = rival.template()
    if template is None:
        return [rival.tokenize(question) for question in QUESTIONS]
    from templates import of_transformers

    rendered = [of_transformers(template, [{"role": "user", "content": text}], True, rival) for text in QUESTIONS]
    return [rival.tokenize(text, begin=False) for text in rendered]


@pytest.fixture(scope="session")
def truth(model):
    """llama.cpp with what the file says: weights decoded to f32, f32 for K and V, no flash attention."""
    path = CACHE / f"{model.stem}.f32.gguf"
    if not path.exists():
        decoded.as_f32(model, path)
    with llama.Model(path, n_ctx=2048, kv=llama.F32, flash="off") as loaded:
        yield loaded


ANSWER_TOKENS = 64


@pytest.fixture(scope="session")
def answers(rival, prompts):
    """llama.cpp's greedy answers: tokens, and the lead of each over the second likeliest."""
    return [rival.greedy(prompt, ANSWER_TOKENS) for prompt in prompts]


@pytest.fixture(scope="session")
def texts(model, prompts):
    """kvist's answers."""
    return [kvist.greedy(model, prompt, ANSWER_TOKENS) for prompt in prompts]


class Places:
    """Every place of one of llama.cpp's answers: what it took, what it found second, and their distance by the truth."""

    def __init__(self, prompt, answer, rival, truth):
        self.tokens, self.first = prompt + answer[:-1], len(prompt) - 1
        by_rival, by_truth = (model.logits(self.tokens)[self.first:] for model in (rival, truth))
        self.two = np.argpartition(by_rival, -2)[:, -2:]
        self.by_truth = by_truth
        self.errors = np.abs(self.lead(by_rival) - self.lead(by_truth))

    def lead(self, logits):
        return np.diff(np.take_along_axis(logits, self.two, 1))[:, 0]


@pytest.fixture(scope="session")
def places(rival, truth, prompts, answers):
    return [Places(prompt, tokens, rival, truth) for prompt, (tokens, _) in zip(prompts, answers)]


@pytest.fixture(scope="session")
def tie(places):
    """Leads below this are ties: half as far again as llama.cpp's own kernels move the lead of the likeliest token, which is not
    the same on every CPU."""
    return 1.5 * max(place.errors.max() for place in places)


class Server(kvist.Server):
    def post(self, path, body):
        return llama_server.post(self.url + path, body)

    def tokens_of(self, messages):
        """A conversation as the model reads it, the beginning of an answer included."""
        session = self.post("/v1/sessions", {"messages": messages})["id"]
        self.post(f"/v1/sessions/{session}/generate", {"max_tokens": 1, "temperature": 0, "ignore_eos": True})
        status, text = self.get(f"/v1/sessions/{session}")
        assert status == 200, text
        return json.loads(text)["tokens"][:-1]


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    """Greedy means greedy: defaults of sampling that a file has do not count."""
    config = tmp_path_factory.mktemp("serve") / "kvist.toml"
    config.write_text('[model]\ngeneration_config = "none"\n')
    running = Server("--config", config, "--model", model, "--context", 4096)
    yield running
    assert running.stop() == 0
