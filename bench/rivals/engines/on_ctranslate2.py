#!/usr/bin/env python3
"""CTranslate2 in this process: `on_ctranslate2.py FOLDER THREADS`, a folder that `ct2-transformers-converter --quantization int8` has
written. It has no cache of prefixes, so rows of a trunk would compute it again: compare.py leaves them out. See rows.py."""
import sys
import time

import ctranslate2
import rows

generator = ctranslate2.Generator(sys.argv[1], device="cpu", compute_type="int8", intra_threads=int(sys.argv[2]))


def run(prompts, n):
    began = time.monotonic()
    first, last = [None] * len(prompts), [0.0] * len(prompts)

    def seen(step):
        now = time.monotonic() - began
        first[step.batch_id], last[step.batch_id] = first[step.batch_id] or now, now
        return False

    names = [[str_of(token) for token in prompt] for prompt in prompts]
    generator.generate_batch(names, max_length=n, min_length=n, include_prompt_in_result=False, callback=seen, sampling_topk=1)
    return first, last


def str_of(token):
    """The random models' vocabulary: 256 bytes, two control tokens, one merge, and names of numbers."""
    return f"[{token}]"


rows.serve(run)
