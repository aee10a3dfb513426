"""/v1/chat/completions through the official client: text, tools, JSON schemas."""
import json
import typing

import openai
import pydantic
import pytest

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is a trait?"}]},
]


def chat(client, **fields):
    name = client.models.list().data[0].id
    create = client.chat.completions.create
    return create(**{"model": name, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0, **fields})


def test_chat(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    choice, = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_says_what_the_document_says(client):
    whole = chat(client).choices[0]
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.finish_reason
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens


def test_the_streaming_helper(client):
    name = client.models.list().data[0].id
    # The helper raises where an answer was cut off: end this one.
    stop = chat(client).choices[0].message.content.split()[3]
    with client.chat.completions.stream(
        model=name, messages=MESSAGES, max_completion_tokens=16, temperature=0, stop=stop
    ) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == said == chat(client, stop=stop).choices[0].message.content


def test_logprobs(client):
    scores = chat(client, logprobs=True, top_logprobs=2, max_completion_tokens=4).choices[0].logprobs.content
    assert len(scores) == 4
    for score in scores:
        assert len(score.top_logprobs) == 2 and score.logprob == score.top_logprobs[0].logprob <= 0
        assert score.bytes is None or bytes(score.bytes).decode(errors="replace") == score.token


def test_n(client):
    answer = chat(client, n=2, temperature=1, seed=3)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_an_assistants_message_goes_back(client):
    said = chat(client).choices[0].message
    # As the client's own documentation does it: the message object, with all its fields that are null.
    answer = chat(client, messages=[*MESSAGES, said, {"role": "user", "content": "And why?"}])
    assert answer.choices[0].message.content is not None


def test_a_dumped_message_goes_back(client, tools):
    # The usual idiom: the fields of the object, and null for all others.
    for asked, fields in [(client, {}), (tools, {"tools": TOOLS, "tool_choice": "none"}),
                          (tools, {"tools": TOOLS, "tool_choice": "required", "max_completion_tokens": 200,
                                   "parallel_tool_calls": False, "temperature": 1, "seed": 1})]:
        said = chat(asked, **fields).choices[0].message
        dumped = said.model_dump()
        assert dumped["function_call"] is None and "annotations" in dumped
        told = [{"role": "tool", "tool_call_id": call.id, "content": "12:00"} for call in said.tool_calls or []]
        messages = [*MESSAGES, dumped, *(told or [{"role": "user", "content": "And why?"}])]
        assert chat(asked, messages=messages).choices[0].message.role == "assistant"


class Answer(pydantic.BaseModel):
    name: typing.Literal["trait", "struct"]
    count: typing.Literal[1, 2, 3]
    useful: bool


def test_parse(client):
    name = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=name, messages=MESSAGES, response_format=Answer, max_completion_tokens=200, temperature=1, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert answer.choices[0].finish_reason == "stop"


def test_parse_while_streaming(client):
    name = client.models.list().data[0].id
    with client.chat.completions.stream(
        model=name, messages=MESSAGES, response_format=Answer, max_completion_tokens=200, temperature=1, seed=2
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)


def test_json_object(client):
    text = chat(client, response_format={"type": "json_object"}, max_completion_tokens=500, temperature=1, seed=4,
                messages=[{"role": "user", "content": "{}"}]).choices[0]
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.message.content), dict)
    else:
        assert text.message.content.lstrip().startswith("{")


TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Weather of a city",
        "parameters": {
            "type": "object", "required": ["city", "unit"], "additionalProperties": False,
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"enum": ["C", "F"]}},
        },
    }},
    {"type": "function", "function": {
        "name": "time", "parameters": {
            "type": "object", "required": ["zone"], "additionalProperties": False,
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
        },
    }},
]


def fits(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        return set(arguments) == {"city", "unit"} and arguments["city"] in ("Oslo", "Rome")
    return call.function.name == "time" and arguments["zone"] in ("UTC", "CET")


def test_a_required_call(tools):
    choice = chat(tools, tools=TOOLS, tool_choice="required", max_completion_tokens=200, parallel_tool_calls=False,
                  temperature=1, seed=1).choices[0]
    assert choice.finish_reason == "tool_calls"
    call, = choice.message.tool_calls
    assert call.type == "function" and call.id and fits(call), call


def test_a_named_call_in_a_stream(tools):
    named = {"type": "function", "function": {"name": "time"}}
    chunks = list(chat(tools, tools=TOOLS, tool_choice=named, max_completion_tokens=200, parallel_tool_calls=False,
                       temperature=1, seed=1, stream=True))
    calls = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            known = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            known["id"] += call.id or ""
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [c["name"] for c in calls.values()] == ["time"]
    assert json.loads(calls[0]["arguments"])["zone"] in ("UTC", "CET") and calls[0]["id"]


def test_a_conversation_with_a_call(tools):
    asked = {"role": "user", "content": "What time is it?"}
    call = chat(tools, messages=[asked], tools=TOOLS, tool_choice="required", max_completion_tokens=200,
                parallel_tool_calls=False, temperature=1, seed=1).choices[0].message
    told = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "12:00"}
    answer = chat(tools, messages=[asked, call, told], tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None and answer.finish_reason in ("stop", "length")


def test_tools_that_are_not_called(tools):
    answer = chat(tools, tools=TOOLS).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_a_session_with_a_call(tools):
    def post(path, **body):
        return tools.post(path, body=body, cast_to=dict[str, object])

    session = post("/sessions", messages=[{"role": "user", "content": "What time is it?"}], tools=TOOLS)["id"]
    answer = post(f"/sessions/{session}/generate", tool_choice="required", max_tokens=200, parallel_tool_calls=False,
                  temperature=1, seed=1)
    call, = answer["choices"][0]["message"]["tool_calls"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"])
    post(f"/sessions/{session}/append",
         messages=[{"role": "tool", "tool_call_id": call["id"], "content": "12:00"}])
    fork = post(f"/sessions/{session}/fork")["sessions"][0]["id"]
    said = post(f"/sessions/{fork}/generate", tool_choice="none", max_tokens=4)
    assert said["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_parsed_call(tools):
    class Time(pydantic.BaseModel):
        zone: typing.Literal["UTC", "CET"]

    name = tools.models.list().data[0].id
    message = tools.chat.completions.parse(
        model=name, messages=MESSAGES, tools=[openai.pydantic_function_tool(Time)], tool_choice="required",
        parallel_tool_calls=False, max_completion_tokens=200, temperature=1, seed=1).choices[0].message
    call, = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Time)


def test_tools_need_a_template(client):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, tools=TOOLS)
    assert refused.value.param == "tools"
