"""Checks beside schemathesis' own: what it is told to let pass must have the reason that it is let pass for."""
import schemathesis
from schemathesis import GenerationMode

# Of requests that fit the schema these are refused: (field, part of the message).
RELATIONS = [
    ("top_logprobs", "needs `logprobs`"),
    ("n", "`max_choices` allows"),
    ("prompt", "`max_choices` allows"),
    ("prompt", "fewer prompts at a time"),
    ("logit_bias", "the vocabulary has"),
    # A text's tokens are not its characters.
    ("prompt", "can have at most"),
    ("messages", "can have at most"),
    # No format of calls without a chat template.
    ("tools", "are not supported with this model"),
    ("messages", "are not supported with this model"),
    ("chat_template_kwargs", "template"),
    # What JSON schemas mean, and which tool a name means, no schema says.
    ("tools", "`tools["),
    ("tool_choice", "tool"),
    ("response_format", "`response_format"),
    # Some grow too large while they are followed.
    ("", "the grammar of the answer failed"),
    # What a session is made of, and how long it has become, no schema knows.
    ("text", "can have at most"),
    ("tokens", "can have at most"),
    ("session", "can have at most"),
    # Tools are for conversations, and stay the same inside an answer.
    ("tools", "continues as plain text"),
    ("tools", "applies only to sessions made of messages"),
    ("tools", "cannot change inside an answer"),
    ("messages", "is made of text or tokens"),
    ("text", "is made of messages"),
    ("tokens", "is made of messages"),
    ("add_generation_prompt", "is not made of messages"),
    ("at", "this session has no messages"),
    ("to", "this session has no messages"),
    ("at", "the session has"),
    ("to", "the session has"),
    ("also", "which is not a sibling"),
    ("also", "is not a session id"),
]


@schemathesis.check
def refusals_have_reasons(ctx, response, case):
    if response.status_code != 400 or case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    error = response.json()["error"]
    param, said = (error["param"] or "").split("[")[0].split(".")[0], error["message"]
    known = any(param == field and part in said for field, part in RELATIONS)
    assert known, f"a request that fits its schema was refused: {error}"
