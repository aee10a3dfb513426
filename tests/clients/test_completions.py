"""/v1/models and /v1/completions through the official client."""
import pytest

PROMPT = "The borrow checker makes sure that"
NAME = "tiny-rust-7m"


def test_models(client):
    models = client.models.list().data
    assert [m.id for m in models] == [NAME]
    one = client.models.retrieve(NAME)
    assert (one.id, one.object) == (NAME, "model")


def complete(client, **fields):
    return client.completions.create(**{"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields})


def test_a_completion(client):
    answer = complete(client)
    assert answer.object == "text_completion" and answer.model == NAME and answer.id
    choice, = answer.choices
    assert choice.finish_reason == "length" and choice.text and choice.logprobs is None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_says_what_the_document_says(client):
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in complete(client, stream=True))


def test_a_repeated_prompt_is_cached(client):
    prompt = "A prompt of several blocks that no other test sends. " * 12
    salt = {"cache_salt": "test_a_repeated_prompt_is_cached"}
    usages = [complete(client, prompt=prompt, extra_body=salt).usage for _ in range(2)]
    first, second = (u.prompt_tokens_details.cached_tokens for u in usages)
    assert first == 0
    # All but the last block, which is not shared because the last token must be computed.
    assert usages[1].prompt_tokens - 32 < second < usages[1].prompt_tokens
    other = complete(client, prompt=prompt, extra_body={"cache_salt": "another"}).usage
    assert other.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_n(client, stream):
    answer = complete(client, n=3, temperature=1, seed=5, stream=stream)
    texts = ["", "", ""]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert len(set(texts)) == 3
    # The answers of n are those of seed, seed + 1, ...
    assert complete(client, temperature=1, seed=6).choices[0].text == texts[1]


def test_several_prompts(client):
    prompts = ["fn main() {", PROMPT]
    choices = complete(client, prompt=prompts).choices
    assert [c.index for c in choices] == [0, 1]
    for prompt, choice in zip(prompts, choices):
        assert choice.text == complete(client, prompt=prompt).choices[0].text


def test_seed(client):
    def draw(seed):
        return complete(client, temperature=1, seed=seed, max_tokens=24).choices[0].text
    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client, stream):
    whole = complete(client, max_tokens=40).choices[0].text
    stop = whole.split()[4]
    answer = complete(client, max_tokens=40, stop=[stop, "never said"], stream=stream)
    choices = [c for chunk in (answer if stream else [answer]) for c in chunk.choices]
    assert "".join(c.text for c in choices) == whole[:whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_logprobs(client):
    choice = complete(client, logprobs=3, max_tokens=6).choices[0]
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset) == 6
    assert "".join(scores.tokens) == choice.text
    for token, score, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs):
        assert len(top) == 3 and score <= 0
        # Greedy: the likeliest was taken.
        assert top[token] == max(top.values()) == score
    streamed = [c.choices[0].logprobs for c in complete(client, logprobs=3, max_tokens=6, stream=True)]
    assert [t for s in streamed if s for t in s.tokens] == scores.tokens


def test_echo_and_tokens(client):
    assert complete(client, echo=True).choices[0].text == PROMPT + complete(client).choices[0].text
    answer = complete(client, prompt=[0, 300, 301, 302])
    assert answer.usage.prompt_tokens == 4


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_scored_prompt(client, max_tokens):
    # As lm-eval asks for it; the second time the cache knows the prompt.
    prompt = "A vector has a length and a capacity. " * 6
    for _ in range(2):
        complete(client, prompt=prompt, max_tokens=1)
        answer = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
        scores, n = answer.choices[0].logprobs, answer.usage.prompt_tokens
        assert answer.usage.completion_tokens == max_tokens
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == n + max_tokens
        assert scores.token_logprobs[0] is None and all(score <= 0 for score in scores.token_logprobs[1:])
        assert answer.choices[0].text.startswith(prompt)
        # Said twice, it is expected more.
        half = n // 2
        assert sum(scores.token_logprobs[half:n]) > sum(scores.token_logprobs[1:half])


def test_logit_bias(client):
    text = complete(client, max_tokens=3, logit_bias={"300": 100}).choices[0].text
    said = complete(client, prompt=[300], max_tokens=1, echo=True).choices[0].text
    assert text and said.startswith(text[:len(text) // 3])
