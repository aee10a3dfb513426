"""llama.cpp through its C interface: the functions of llama.h that the wheel of xllamacpp exports.

The layouts of the two parameter structs are those of the version that requirements.txt pins. `open_library` compares
their defaults with what llama.h documents, so that another layout is found at once.
"""
import ctypes as c
import functools
import importlib.util
import pathlib

import numpy as np

F32, F16 = 0, 1
FLASH = {"auto": -1, "off": 0, "on": 1}


class ModelParams(c.Structure):
    _fields_ = [
        ("devices", c.c_void_p), ("tensor_buft_overrides", c.c_void_p), ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int), ("load_mode", c.c_int), ("lazy_mode", c.c_int), ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p), ("progress_callback", c.c_void_p), ("progress_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p), ("vocab_only", c.c_bool), ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool), ("no_host", c.c_bool), ("no_alloc", c.c_bool), ("load_mtp", c.c_bool),
    ]


class ContextParams(c.Structure):
    _fields_ = [
        *[(name, c.c_uint32) for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")],
        ("n_threads", c.c_int32), ("n_threads_batch", c.c_int32),
        *[(name, c.c_int) for name in (
            "ctx_type", "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type")],
        *[(name, c.c_float) for name in (
            "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast",
            "yarn_beta_slow")],
        ("yarn_orig_ctx", c.c_uint32), ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p), ("cb_eval_user_data", c.c_void_p), ("type_k", c.c_int), ("type_v", c.c_int),
        ("abort_callback", c.c_void_p), ("abort_callback_data", c.c_void_p), ("younger", c.c_void_p),  # null by default
        *[(name, c.c_bool) for name in (
            "embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")],
        ("samplers", c.c_void_p), ("n_samplers", c.c_size_t), ("ctx_other", c.c_void_p),
    ]


class Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32), ("token", c.POINTER(c.c_int32)), ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)), ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))), ("logits", c.POINTER(c.c_int8)),
    ]


@c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
def errors_only(level, text, _):
    if level == 4:
        print("llama.cpp:", text.decode(errors="replace").strip())


@functools.cache
def open_library():
    package = pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent
    lib = c.CDLL(str(next(package.glob("xllamacpp*.so"))))
    types = {
        "llama_model_default_params": (ModelParams, []),
        "llama_context_default_params": (ContextParams, []),
        "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, ModelParams]),
        "llama_model_free": (None, [c.c_void_p]),
        "llama_init_from_model": (c.c_void_p, [c.c_void_p, ContextParams]),
        "llama_free": (None, [c.c_void_p]),
        "llama_model_get_vocab": (c.c_void_p, [c.c_void_p]),
        "llama_vocab_n_tokens": (c.c_int32, [c.c_void_p]),
        "llama_tokenize": (c.c_int32, [
            c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool]),
        "llama_detokenize": (c.c_int32, [
            c.c_void_p, c.POINTER(c.c_int32), c.c_int32, c.c_char_p, c.c_int32, c.c_bool, c.c_bool]),
        "llama_vocab_bos": (c.c_int32, [c.c_void_p]),
        "llama_vocab_eos": (c.c_int32, [c.c_void_p]),
        "llama_vocab_is_eog": (c.c_bool, [c.c_void_p, c.c_int32]),
        "llama_model_chat_template": (c.c_char_p, [c.c_void_p, c.c_char_p]),
        "llama_batch_init": (Batch, [c.c_int32, c.c_int32, c.c_int32]),
        "llama_batch_free": (None, [Batch]),
        "llama_decode": (c.c_int32, [c.c_void_p, Batch]),
        "llama_get_logits_ith": (c.POINTER(c.c_float), [c.c_void_p, c.c_int32]),
        "llama_get_memory": (c.c_void_p, [c.c_void_p]),
        "llama_memory_clear": (None, [c.c_void_p, c.c_bool]),
        "llama_log_set": (None, [c.c_void_p, c.c_void_p]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    context, model = lib.llama_context_default_params(), lib.llama_model_default_params()
    known = (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.type_k, context.type_v,
             context.flash_attn_type, context.yarn_beta_fast, context.offload_kqv, model.use_extra_bufts)
    assert known == (512, 2048, 512, 1, F16, F16, -1, -1.0, True, True), f"another llama.h: {known}"
    lib.llama_log_set(errors_only, None)
    return lib


class Model:
    """A model with one context. `repack`: its weights in the order of the widest kernels, as llama.cpp does by default."""

    def __init__(self, path, n_ctx=1024, kv=F16, flash="auto", repack=True, threads=1):
        self.lib = open_library()
        params = self.lib.llama_model_default_params()
        params.use_extra_bufts = repack
        self.model = self.lib.llama_model_load_from_file(bytes(path), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.vocab)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.type_k, params.type_v = n_ctx, n_ctx, kv, kv
        params.flash_attn_type, params.n_threads, params.n_threads_batch = FLASH[flash], threads, threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        assert self.context, f"llama.cpp gives no context for {path}"
        self.batch = self.lib.llama_batch_init(n_ctx, 0, 1)
        self.n_past = 0

    def close(self):
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def template(self):
        text = self.lib.llama_model_chat_template(self.model, None)
        return text.decode() if text else None

    def tokenize(self, text, special=True, begin=True):
        data = text.encode()
        room = len(data) + 8
        tokens = (c.c_int32 * room)()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), tokens, room, begin, special)
        assert n >= 0
        return list(tokens[:n])

    def detokenize(self, tokens):
        room = 64 * len(tokens) + 64
        text = c.create_string_buffer(room)
        ids = (c.c_int32 * len(tokens))(*tokens)
        n = self.lib.llama_detokenize(self.vocab, ids, len(tokens), text, room, False, True)
        assert n >= 0
        return text.raw[:n].decode(errors="replace")

    def begin(self):
        return self.detokenize([self.lib.llama_vocab_bos(self.vocab)])

    def end(self):
        return self.detokenize([self.lib.llama_vocab_eos(self.vocab)])

    def ends(self, token):
        return self.lib.llama_vocab_is_eog(self.vocab, token)

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.n_past = 0

    def feed(self, tokens, every=False):
        """Logits behind the last token, `[n_vocab]`, or behind every one, `[tokens, n_vocab]`."""
        b = self.batch
        b.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, self.n_past + i, 1, 0
            b.logits[i] = every or i + 1 == len(tokens)
        assert self.lib.llama_decode(self.context, b) == 0, "llama_decode failed"
        self.n_past += len(tokens)
        row = lambda i: np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, i), (self.n_vocab,)).copy()
        return np.stack([row(i) for i in range(len(tokens))]) if every else row(len(tokens) - 1)

    def logits(self, tokens):
        """Behind every token, from an empty cache."""
        self.clear()
        return self.feed(tokens, every=True)

    def greedy(self, tokens, n):
        """The next `n` tokens, ends of text included, and the lead of each over the second."""
        self.clear()
        logits, out, leads = self.feed(tokens), [], []
        while True:
            second, first = np.partition(logits, -2)[-2:]
            out.append(int(np.argmax(logits)))
            leads.append(float(first - second))
            if len(out) == n:
                return out, leads
            logits = self.feed(out[-1:])
