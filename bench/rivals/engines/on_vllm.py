#!/usr/bin/env python3
"""vLLM's CPU backend in this process: `on_vllm.py FOLDER DEPTH [compiled]`: a Hugging Face folder (W8A8 of compressed-tensors, or bf16), and
the longest context of the rows. Without `compiled`, torch.compile is off (`enforce_eager`). See rows.py."""
import os
import sys
import time

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)

if __name__ == "__main__":
    import rows
    from vllm import LLM, SamplingParams

    engine = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=int(sys.argv[2]) + 4096, skip_tokenizer_init=True, enable_prefix_caching=True,
                 enforce_eager=sys.argv[3:] != ["compiled"], max_num_seqs=16, max_num_batched_tokens=512, enable_chunked_prefill=True,
                 disable_log_stats=True).llm_engine
    asked = 0

    def run(prompts, n):
        global asked
        began, at = time.monotonic(), {}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, temperature=0, detokenize=False)
            asked += 1
            at[str(asked)] = i
            engine.add_request(str(asked), {"prompt_token_ids": prompt}, params)
        first, last = [None] * len(prompts), [0.0] * len(prompts)
        while engine.has_unfinished_requests():
            for out in engine.step():
                i, now = at[out.request_id.split("-")[0]], time.monotonic() - began
                if out.outputs[0].token_ids:
                    first[i], last[i] = first[i] or now, now
        return first, last

    rows.serve(run)
