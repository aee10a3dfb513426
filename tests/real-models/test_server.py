"""The same through `kvist serve`: chat completions, JSON schemas, tools."""
import json

import llama_server
import pytest
from conftest import ANSWER_TOKENS
from prompts import QUESTIONS

# Small models end what has an end, and nothing else.
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Berlin", "London", "Madrid", "Paris", "Rome"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": SCHEMA["properties"]["city"]},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def asked(text, **fields):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": ANSWER_TOKENS, **fields}


def test_a_chat_completion_says_what_the_program_says(server, rival, prompts, texts):
    for question, prompt, tokens in zip(QUESTIONS, prompts, texts):
        body = asked(question) if rival.template() else {"prompt": question, "temperature": 0, "max_tokens": ANSWER_TOKENS}
        path = "/v1/chat/completions" if rival.template() else "/v1/completions"
        answer = server.post(path, {"model": server.name, **body})
        choice = answer["choices"][0]
        end = next((i for i, token in enumerate(tokens) if rival.ends(token)), None)
        assert choice["finish_reason"] == ("length" if end is None else "stop")
        text = server.post("/detokenize", {"tokens": tokens[:end]})["prompt"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]).strip() == text.strip()
        assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_a_schema(server, model, report):
    said = {}
    for question in ("What is the capital of France? As JSON.", "Which city has the Colosseum? As JSON."):
        answer = server.post("/v1/chat/completions", {"model": server.name, **asked(question, response_format=FORM)})
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        value = json.loads(choice["message"]["content"])
        assert list(value) == ["city", "is_capital"] and value["city"] in SCHEMA["properties"]["city"]["enum"]
        assert type(value["is_capital"]) is bool
        said[question] = value
    # Which blanks stand between the parts is another grammar's affair, and they are tokens that the model reads: answers
    # of the two are told, not compared.
    with llama_server.serving(model) as post:
        for question, value in said.items():
            theirs = post("/v1/chat/completions", asked(question, response_format=FORM))
            theirs = json.loads(theirs["choices"][0]["message"]["content"])
            report(f"{model.stem}: {question} kvist {json.dumps(value)}, llama.cpp {json.dumps(theirs)}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"])
def test_a_tool(server, model, rival, choice):
    """SmolLM2's template knows no tools: kvist tells it of them."""
    if rival.template() is None:
        assert "gemma" in model.name, f"{model.name} has a chat template, which was not found"
        pytest.skip("a model without a chat template takes no tools")
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    body = asked("What is the weather in Paris?", **fields)
    answer = server.post("/v1/chat/completions", {"model": server.name, **body})["choices"][0]
    assert answer["finish_reason"] == "tool_calls", answer
    call, = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}
