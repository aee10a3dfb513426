"""Tool calls, JSON schemas and refusals through each router, by the official client: what a worker itself answers."""
import json
import sys
import typing
from pathlib import Path

import openai
import pydantic
import pytest
from fleet import MODEL

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/clients"))
import gguf  # noqa: E402

ASKED = [{"role": "user", "content": "What time is it?"}]
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Weather of a city",
        "parameters": {
            "type": "object", "required": ["city"], "additionalProperties": False,
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        },
    }},
    {"type": "function", "function": {
        "name": "time", "description": "Time of a zone",
        "parameters": {
            "type": "object", "required": ["zone"], "additionalProperties": False,
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
        },
    }},
]


@pytest.fixture
def router(kind, start, tmp_path):
    """Its workers have the embedded model with a chat template that teaches tool calls."""
    model = tmp_path / "hermes.gguf"
    template = (ROOT / "tests/clients/hermes.jinja").read_text()
    embedded = (ROOT / "crates/model/embedded/tiny-rust-7m.gguf").read_bytes()
    model.write_bytes(gguf.with_text(embedded, "tokenizer.chat_template", template))
    return start(kind, None, "--model", str(model), "--name", MODEL, "--context", "8192", "--deterministic")


def client_of(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def chat(url, **fields):
    request = {"model": MODEL, "messages": ASKED, "max_tokens": 60, "temperature": 1, "seed": 1, "tools": TOOLS,
               "parallel_tool_calls": False, **fields}
    given = {name: value for name, value in request.items() if value is not None}
    return client_of(url).chat.completions.create(**given)


def said(choice):
    """What a whole answer says, without the names that each answer has of its own."""
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


def streamed(chunks):
    """The same of a stream."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, ["", "", ""])
                known[0] = call.type or known[0]
                known[1] += call.function.name or ""
                known[2] += call.function.arguments or ""
    return content, [tuple(calls[i]) for i in sorted(calls)], reason


def test_calls(router):
    named = {"type": "function", "function": {"name": "time"}}
    for choice, called in [("required", ("weather", "time")), (named, ("time",)), ("auto", None), (None, None), ("none", ())]:
        own = said(chat(router.workers[0].url, tool_choice=choice).choices[0])
        assert said(chat(router.url, tool_choice=choice).choices[0]) == own
        assert streamed(chat(router.url, tool_choice=choice, stream=True)) == own
        _, calls, reason = own
        if called:
            (_, name, arguments), = calls
            assert reason == "tool_calls" and name in called and set(json.loads(arguments)) <= {"city", "zone"}
        elif called == ():
            assert calls == [] and reason != "tool_calls"


def test_a_conversation_with_a_call(router):
    call = chat(router.url, tool_choice="required").choices[0].message.tool_calls[0]
    # The keys in the order in which routers write them again: the template prints them.
    function = {"name": call.function.name, "arguments": call.function.arguments}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [
        {"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "12:00"}]
    answers = [said(chat(url, messages=messages, tool_choice="none").choices[0])
               for url in (router.url, router.workers[0].url)]
    assert answers[0] == answers[1] and answers[0][1] == []


def test_parsing_helpers(router):
    class Time(pydantic.BaseModel):
        zone: typing.Literal["UTC", "CET"]

    create = dict(model=MODEL, messages=ASKED, max_tokens=60, temperature=1, seed=1)
    parse = client_of(router.url).chat.completions.parse
    message = parse(tools=[openai.pydantic_function_tool(Time)], tool_choice="required", parallel_tool_calls=False,
                    **create).choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Time)
    assert isinstance(parse(response_format=Time, **create).choices[0].message.parsed, Time)


# What only a worker checks, and what smg checks too and words itself.
OF_WORKERS = {
    "a schema that is none": {"tools": [{"type": "function", "function": {
        "name": "x", "description": "", "parameters": {"type": "nonsense"}}}]},
    "an answer's schema that is none": {"tools": None, "parallel_tool_calls": None, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}},
    "an unknown field": {"extra_body": {"temprature": 1}},
    "a long prompt": {"messages": [{"role": "user", "content": "word " * 9000}]},
}
OF_BOTH = {
    "a tool that is not given": {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
    "a choice without tools": {"tools": None, "tool_choice": "required"},
    "an unknown model": {"model": "gpt-5"},
    "a temperature": {"temperature": 3},
    "no tokens": {"max_tokens": 0},
    "too many answers": {"n": 100_000},
    "no messages": {"messages": []},
}


def test_refusals(router):
    def refused(url, fields):
        with pytest.raises(openai.APIStatusError) as error:
            chat(url, **fields)
        return type(error.value), error.value.status_code, error.value.body

    for name, fields in {**OF_WORKERS, **OF_BOTH}.items():
        for stream in (None, True):
            own = refused(router.workers[0].url, {**fields, "stream": stream})
            through = refused(router.url, {**fields, "stream": stream})
            assert 400 <= own[1] < 500 and own[2]["message"], name
            if router.kind == "vllm-router" or name in OF_WORKERS:
                assert through == own, name
            else:
                assert through[:2] == own[:2] and through[2]["message"], name

    # Of another type: the routers read the fields, and refuse it themselves.
    _, status, _ = refused(router.url, {"max_tokens": "many"})
    assert status == (422 if router.kind == "vllm-router" else 400)
