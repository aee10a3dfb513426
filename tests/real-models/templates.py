"""Chat templates as transformers renders them: jinja2 with the settings of its `chat_template_utils`."""
import datetime
import json

import jinja2.ext
import jinja2.sandbox


def of_transformers(template, messages, answer_follows, tokens_of, **more):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=answer_follows, bos_token=tokens_of.begin(), eos_token=tokens_of.end(),
        **more,
    )
