"""llama-server inside this process."""
import contextlib
import json
import urllib.request

import xllamacpp


@contextlib.contextmanager
def serving(model):
    """Yields `post(path, body)`, which answers the document."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.port, params.warmup, params.use_jinja = 2048, 1, 0, False, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = 0
    server = xllamacpp.Server(params)
    yield lambda path, body: post(server.listening_address + path, body)
    del server


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)
