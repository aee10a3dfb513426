"""Branches with the official `openai` client: a question, three answers side by side, the best one goes on.

    kvist serve                      # in another terminal
    pip install openai
    python docs/examples/branches.py [http://127.0.0.1:8080/v1] [key]
"""
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI, Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
key = sys.argv[2] if len(sys.argv) > 2 else "any"
client = OpenAI(base_url=url, api_key=key)


def post(path, **body):
    return client.post(path, body=body, cast_to=object)


def user(text):
    return {"role": "user", "content": text}


# A session is a history without memory: nothing is computed before something is generated.
brief = "You explain the standard library of Rust to people who write programs in other languages. Be brief, name types \
and functions as the documentation does, and say what a call costs where that is known."
trunk = post("/sessions", messages=[{"role": "system", "content": brief}, user("What is a vector?")], name="vectors")
forks = post(f"/sessions/{trunk['id']}/fork", n=3)["sessions"]


def answer(fork, seed):
    path = f"/sessions/{fork['id']}/generate"
    return client.post(path, body={"max_tokens": 24, "temperature": 0.8, "seed": seed}, cast_to=ChatCompletion)


# All at once: they run in one batch, and the question is computed once.
with ThreadPoolExecutor() as pool:
    answers = list(pool.map(answer, forks, range(3)))
for fork, said in zip(forks, answers):
    cached = said.usage.prompt_tokens_details.cached_tokens
    print(f"{fork['id']}: {said.choices[0].message.content!r} ({cached} of {said.usage.prompt_tokens} tokens cached)")

# The longest one wins; the others are deleted.
winner = max(zip(forks, answers), key=lambda pair: len(pair[1].choices[0].message.content))[0]
print("deleted:", post(f"/sessions/{winner['id']}/keep")["deleted"])

# It goes on, streamed; a fork is taken while it speaks.
post(f"/sessions/{winner['id']}/append", messages=[user("And its capacity?")])
stream = client.post(
    f"/sessions/{winner['id']}/generate",
    body={"max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}},
    cast_to=ChatCompletionChunk,
    stream=True,
    stream_cls=Stream[ChatCompletionChunk],
)
snapshot, said = None, ""
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        said += chunk.choices[0].delta.content
        snapshot = snapshot or post(f"/sessions/{winner['id']}/fork")["sessions"][0]
    elif chunk.usage:
        print(f"{said!r} ({chunk.usage.completion_tokens} tokens)")

# Back to where its last answer began, and another way from there.
placed = client.get(f"/sessions/{winner['id']}", cast_to=object)["messages"]
post(f"/sessions/{winner['id']}/rollback", to={"message": len(placed) - 1})
print("again:", answer(winner, seed=7).choices[0].message.content)

for session in client.get("/sessions", cast_to=object)["data"]:
    print(session["id"], "of", session["parent"], session["n_tokens"], "tokens,", session["shared_tokens"], "shared")
assert snapshot["parent"] == winner["id"]
client.delete(f"/sessions/{trunk['id']}", cast_to=object)
