#!/usr/bin/env python3
"""OpenVINO GenAI with continuous batching in this process: `on_openvino.py MODEL THREADS`, a GGUF file that it reads itself (Llama in
q8_0, q4_0, q4_K or f16) or a folder with openvino_model.xml. K and V in 8 bits, its default. See rows.py."""
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai
import rows

scheduler = genai.SchedulerConfig()
scheduler.cache_size = 2
scheduler.max_num_batched_tokens = 512
scheduler.max_num_seqs = 16
scheduler.dynamic_split_fuse = True
scheduler.enable_prefix_caching = True
properties = {"INFERENCE_NUM_THREADS": int(sys.argv[2]), "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8"}
pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", properties)
asked = 0


def run(prompts, n):
    global asked
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = n
    config.ignore_eos = True
    began, handles = time.monotonic(), []
    for prompt in prompts:
        asked += 1
        handles.append(pipe.add_request(asked, openvino.Tensor(np.array([prompt], dtype=np.int64)), config))
    first, last = [None] * len(prompts), [0.0] * len(prompts)
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.monotonic() - began
        for i, handle in enumerate(handles):
            if handle.can_read() and any(output.generated_ids for output in handle.read().values()):
                first[i], last[i] = first[i] or now, now
    return first, last


rows.serve(run)
