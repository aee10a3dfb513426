#!/usr/bin/env python3
"""A decode step of one model in ExecuTorch: with kvist's caches, and with ExecuTorch's own cache.

Both programs come from the same weights, have dynamic lengths, and are lowered with XNNPACK. They differ in attention alone:

- kvist: `kvcache::update_and_attend`; the cache belongs to a session.
- own: `llama::update_cache` into buffers of the program (`CustomKVCache` of executorch.examples.models.llama) and
  `llama::custom_sdpa`, as ExecuTorch's Llama recipe has it with `enable_dynamic_shape` and `use_sdpa_with_kv_cache`.

Each side is a process. They take turns, so that neither meets another state of the machine, and their memory is apart."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHUNK = 256


def shape(args):
    return dict(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
        max_position_embeddings=max(args.capacity, 8192), tie_word_embeddings=True, initializer_range=0.02,
    )


def model(args):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape(args))).eval()


def export_own(args, out):
    """The model with ExecuTorch's own cache, of `capacity` tokens."""
    import torch
    from executorch.examples.models.llama.source_transformation.custom_kv_cache import CustomKVCache
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        position, caches = kwargs["own_position"], kwargs["own_caches"]
        start = position[0].item()
        torch._check(start >= 0)
        torch._check(start < args.capacity)
        cache = caches[module.layer_idx]
        cache.update(position, key, value)
        # update() returns transposed buffers, for models that transpose them back; ExecuTorch's recipe removes such pairs by a pass.
        return torch.ops.llama.custom_sdpa(query.transpose(1, 2), cache.k_cache, cache.v_cache, start, None, 0.0, True, scaling), None

    AttentionInterface.register("own", attend)
    AttentionMaskInterface.register("own", lambda *args, **kwargs: None)

    class Own(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            model.config._attn_implementation = "own"
            self.model = model
            self.caches = torch.nn.ModuleList(
                CustomKVCache(1, args.capacity, args.kv_heads, args.head_dim) for _ in range(args.layers)
            )

        def forward(self, tokens, position, rows):
            out = self.model.model(
                input_ids=tokens, position_ids=position.view(1, -1), attention_mask=None, use_cache=False,
                own_position=position.view(-1), own_caches=self.caches,
            )
            return (self.model.lm_head(out.last_hidden_state[0, rows]),)

    n = torch.export.Dim("n", min=1, max=CHUNK)
    rows = torch.export.Dim("rows", min=1, max=CHUNK)
    inputs = (torch.zeros(1, 3, dtype=torch.long), torch.arange(3).unsqueeze(-1), torch.tensor([1, 2]))
    with torch.no_grad():
        program = torch.export.export(Own(model(args)), inputs, dynamic_shapes=({1: n}, {0: n}, {0: rows}), strict=False)
    edge = to_edge_transform_and_lower(
        program, partitioner=[XnnpackPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
    )
    lowered = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False)))
    with open(out, "wb") as file:
        lowered.write_to_file(file)


def export_kvist(args, out):
    import kvist.executorch as ke

    ke.export(model(args), out, max_step_tokens=CHUNK)


def memory_mib():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {name: round(int(fields[name].split()[0]) / 1024, 1) for name in ("VmRSS", "VmHWM")}


def serve(args):
    """One side: reads commands from stdin, answers with one line of JSON each."""
    import torch

    if args.side == "own":
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        from executorch.runtime import Runtime, Verification

        program = Runtime.get().load_program(Path(args.pte), verification=Verification.Minimal)
        forward = program.load_method("forward")
        run = lambda inputs: forward.execute(inputs)[0]  # noqa: E731
    else:
        import kvist.executorch as ke

        program = ke.Program(args.pte)
        name, _, threads = args.dtype.partition("/")
        dtype, more = {
            "f32": (torch.float32, {}), "f16": (torch.float16, {}),
            "q8": (torch.uint8, dict(bits=8, group_size=32)), "q4": (torch.uint8, dict(bits=4, group_size=32)),
        }[name]
        config = ke.make_config(program.cache_params, args.capacity, dtype, max_step_tokens=CHUNK, threads=int(threads or 0), **more)
        session = ke.make_decode_session("kvist", config)
        run = lambda inputs: program.execute(session, inputs)[0]  # noqa: E731
    position = 0

    def step(n):
        nonlocal position
        torch.manual_seed(position)
        tokens = torch.randint(args.vocab, (1, n))
        inputs = [tokens, torch.arange(position, position + n).unsqueeze(-1), torch.tensor([n - 1])]
        begin = time.perf_counter()
        logits = run(inputs)
        took = time.perf_counter() - begin
        position += n
        return took, logits

    print(json.dumps(memory_mib()), flush=True)
    for line in sys.stdin:
        command, n = line.split()
        if command == "fill":
            while position < int(n):
                _, logits = step(min(CHUNK, int(n) - position))
            answer = {"logits": logits[-1, :64].tolist(), **memory_mib()}
        else:
            answer = {"ms": [step(1)[0] * 1e3 for _ in range(int(n))], **memory_mib()}
        print(json.dumps(answer), flush=True)


class Side:
    def __init__(self, args, name, side, pte, dtype="f32"):
        self.name, self.steps = name, []
        common = [a for a in sys.argv[1:]]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *common, "--side", side, "--pte", str(pte), "--dtype", dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if args.quiet else None, text=True,
        )
        self.loaded = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: run with --loud to see why")
        return json.loads(line)

    def ask(self, command, n):
        print(command, n, file=self.process.stdin, flush=True)
        return self._answer()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = lambda name, value: parser.add_argument(f"--{name}", type=int, default=value)  # noqa: E731
    for name, value in (
        ("layers", 16), ("hidden", 768), ("heads", 12), ("kv-heads", 4), ("head-dim", 64), ("vocab", 8192), ("capacity", 8192),
        ("rounds", 24), ("steps", 4),
    ):
        number(name, value)
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--dtypes", default="f32,f16,q8", help="kvist's storages, each with /THREADS if wanted; ExecuTorch's own cache is f32")
    parser.add_argument("--folder", default=str(HERE.parent / "target/executorch"), help="where the programs are kept")
    parser.add_argument("--loud", dest="quiet", action="store_false")
    parser.add_argument("--side", choices=("own", "kvist"), help=argparse.SUPPRESS)
    parser.add_argument("--export", choices=("own", "kvist"), help=argparse.SUPPRESS)
    parser.add_argument("--pte", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="f32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return serve(args)
    if args.export:
        return {"own": export_own, "kvist": export_kvist}[args.export](args, args.pte)

    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    tag = "-".join(str(getattr(args, name)) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "capacity"))
    ptes = {}
    for side in ("own", "kvist"):
        ptes[side] = folder / f"{side}-{tag}.pte"
        if not ptes[side].exists():
            made = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--export", side, "--pte", str(ptes[side]) + ".part"])
            if made.returncode:
                raise SystemExit(f"exporting {ptes[side].name} failed")
            os.rename(str(ptes[side]) + ".part", ptes[side])
    sides = [Side(args, "ExecuTorch's own, f32", "own", ptes["own"])]
    sides += [Side(args, f"kvist, {dtype}", "kvist", ptes["kvist"], dtype) for dtype in args.dtypes.split(",")]

    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    print(f"{cpu}, {os.cpu_count()} cores; {args.layers} layers of {args.heads} heads on {args.kv_heads} KV heads of {args.head_dim}, "
          f"hidden {args.hidden}, vocabulary {args.vocab}, f32 weights; capacity {args.capacity} tokens.")
    print(f"Median (fastest) of {args.rounds} rounds of {args.steps} steps, all sides in turns; the last step ends at the context. MiB are resident.\n")
    print("| context | cache | ms per step | speed, own = 1 | MiB of the process | of these since it was loaded |\n|--:|---|--:|--:|--:|--:|")
    for context in map(int, args.contexts.split(",")):
        filled = [side.ask("fill", context - args.rounds * args.steps) for side in sides]
        # The same model, or the comparison means nothing: f32 beside f32.
        for side, found in zip(sides, filled):
            if side.name.endswith("f32"):
                error = max(abs(a - b) for a, b in zip(found["logits"], filled[0]["logits"]))
                assert error < 1e-3, f"{side.name}: logits differ by {error}"
        steps, memory = [[] for _ in sides], [None] * len(sides)
        for turn in range(args.rounds):
            for i in range(len(sides)):
                i = (i + turn) % len(sides)
                answer = sides[i].ask("steps", args.steps)
                steps[i].append(statistics.median(answer["ms"]))
                memory[i] = answer["VmRSS"]
        own = statistics.median(steps[0])
        for side, taken, resident in zip(sides, steps, memory):
            ms = statistics.median(taken)
            print(f"| {context} | {side.name} | {ms:.2f} ({min(taken):.2f}) | {own / ms:.2f} | {resident:.0f} | "
                  f"{resident - side.loaded['VmRSS']:.0f} |", flush=True)
    print("\nLoaded: " + "; ".join(f"{side.name} {side.loaded['VmRSS']:.0f} MiB" for side in sides) + ".")
    for side in sides:
        side.process.stdin.close()
        side.process.wait()


if __name__ == "__main__":
    main()
