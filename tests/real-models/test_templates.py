"""Chat templates, byte for byte as llama.cpp and as transformers render them, and the tokens they become."""
import llama_server
import pytest
from prompts import CONVERSATIONS
from templates import of_transformers


@pytest.fixture(scope="module")
def template(model, rival):
    template = rival.template()
    if template is None:
        assert "gemma" in model.name, f"{model.name} has a chat template, which was not found"
        pytest.skip(f"{model.name} has no chat template")
    return template


@pytest.fixture(scope="module")
def theirs(model, template):
    with llama_server.serving(model) as post:
        yield post


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_a_conversation(server, rival, template, theirs, messages):
    by_transformers = of_transformers(template, messages, True, rival)
    by_llama = theirs("/apply-template", {"messages": messages})["prompt"]
    # llama.cpp adds the token that begins a text when it makes tokens, and takes it from the text here.
    begin = rival.begin()
    text = by_transformers.removeprefix(begin) if not by_llama.startswith(begin) else by_transformers
    assert by_llama == text
    ours = server.tokens_of(messages)
    assert rival.detokenize(ours) == by_transformers
    assert ours == rival.tokenize(by_transformers, begin=False)


@pytest.mark.parametrize("text", [
    "Hello world", "Hello  world\n\n\n x", " leading", "tabs\tand\r\nlines", "Grüß dich, naïve café", "你好，世界", "🙂👩‍👩‍👧",
    "1234567890 3.14", "don't we'll I'm", "", "a" * 100, "x = {'a': [1, 2]}  # comment", "<|im_start|>user\nhi<|im_end|>",
    "\u200b\ufeff\u00a0",
])
def test_a_text_becomes_the_same_tokens(server, rival, text):
    assert server.post("/tokenize", {"prompt": text, "add_special_tokens": True})["tokens"] == rival.tokenize(text)
