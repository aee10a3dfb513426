"""Checks beside schemathesis' own: what it is told to let pass must have the reason that it is let pass for."""
import schemathesis
from schemathesis import GenerationMode

# Of requests that fit the schema these are refused: (field, part of the message).
RELATIONS = [
    ("top_logprobs", "needs `logprobs`"),
    ("best_of", "other than `n`"),
    ("echo", "together with"),
    ("n", "are allowed at once"),
    ("max_completion_tokens", "give one of them"),
    ("logit_bias", "the vocabulary has"),
    # A text's tokens are not its characters.
    ("prompt", "have room for"),
    ("messages", "have room for"),
    # No format of calls without a chat template.
    ("tools", "no chat template"),
    ("tools", "teaches no format"),
    ("messages", "no chat template"),
    ("tool_choice", ""),
    ("tools", ""),
    ("response_format", ""),
    ("chat_template_kwargs", ""),
]


@schemathesis.check
def refusals_have_reasons(ctx, response, case):
    if response.status_code not in (400, 503):
        return
    error = response.json()["error"]
    if response.status_code == 503:
        assert error["code"] == "deadline_exceeded" and "retry-after" in response.headers, error
        return
    meta = case.meta
    if meta is None or meta.generation.mode is not GenerationMode.POSITIVE:
        return
    param, said = (error["param"] or "").split("[")[0].split(".")[0], error["message"]
    known = any(param == field and part in said for field, part in RELATIONS)
    assert known, f"a request that fits its schema was refused: {error}"
