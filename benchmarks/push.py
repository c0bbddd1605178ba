"""Seconds and memory of a push of a LoRA policy of 7B to a colocated vLLM: TRL's way, and beside the base.

    python -m benchmarks.push [--small] [--without_vllm] [--device cuda]

Both ways go through the same `sync_weights` of the package, in turn. First into a sink that copies each tensor, then
into a vLLM engine in the process. `base moved` is whether a digest of all frozen weights differs from that before.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import peft
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from salesrl_trl.generation.merging import dithered, merged_beside
from salesrl_trl.generation.vllm import SalesVLLMGeneration

SEVEN_B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
STARTED = time.monotonic()


def say(*words):
    print(f"[{time.monotonic() - STARTED:6.1f} s]", *words, flush=True)


def build(shape, device, **lora):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            base = Qwen2ForCausalLM(Qwen2Config(**shape))
    finally:
        torch.set_default_dtype(torch.float32)
    return adapted(base.to(device), **lora)


def adapted(base, **lora):
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", **lora))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def digest(model):
    """Two checksums of each frozen weight, over its bits."""
    sums = []
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            for bits in parameter.detach().view(torch.int16).flatten().split(2**26):
                wide = bits.long()
                places = torch.arange(wide.numel(), device=wide.device) % 65521 + 1
                sums += [wide.sum(), (wide * places).sum()]
    return hash(tuple(torch.stack(sums).tolist()))


class Cuda:
    """Memory and time of the device; zeros on a CPU."""

    def __init__(self, device):
        self.is_there = device == "cuda"

    def wait(self):
        if self.is_there:
            torch.cuda.synchronize()

    def begin(self):
        self.wait()
        if self.is_there:
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() if self.is_there else 0
        self.reserved = torch.cuda.memory_reserved() if self.is_there else 0

    def above(self):
        """MiB that were allocated above what was there, at most."""
        return (torch.cuda.max_memory_allocated() - self.before) / 2**20 if self.is_there else 0.0


def measure(label, generation, model, device, repeats, warm=2):
    cuda, seconds, peaks, moved = Cuda(device), {True: [], False: []}, {True: [], False: []}, {True: 0, False: 0}
    known = digest(model)
    for turn in range(warm + repeats):
        for beside in (False, True):
            generation._merges_beside = beside
            cuda.begin()
            started = time.perf_counter()
            generation.sync_weights()
            cuda.wait()
            took = time.perf_counter() - started
            peak = cuda.above()
            if turn >= warm:
                seconds[beside].append(took)
                peaks[beside].append(peak)
            after = digest(model)
            moved[beside] += after != known
            known = after
    for beside in (False, True):
        took = sorted(seconds[beside])
        say(json.dumps({
            "push": label, "way": "beside the base" if beside else "TRL's", "n": len(took),
            "median_s": round(statistics.median(took), 4), "min_s": round(took[0], 4), "max_s": round(took[-1], 4),
            "peak_MiB_above": round(max(peaks[beside]), 1),
            "pushes_that_moved_the_base": f"{moved[beside]} of {warm + repeats}",
        }))  # fmt: skip
    more = statistics.median(seconds[True]) - statistics.median(seconds[False])
    say(f"{label}: a push beside the base takes {more:+.4f} s (median) against TRL's")


def into_a_sink(model, sink):
    """A generation without vLLM: `load_weights` gets what an engine would get."""
    generation = SalesVLLMGeneration.__new__(SalesVLLMGeneration)
    generation.model, generation.mode, generation.enable_sleep_mode = model, "colocate", False
    generation.engine_options, generation.processing_class = {}, None
    generation.loop = SimpleNamespace(pushing=nullcontext)
    generation._dist = SimpleNamespace(is_fsdp=False, fsdp_version=None, gather_params=lambda _: nullcontext())
    generation.accelerator = SimpleNamespace(device=torch.device("cuda"), is_main_process=True)
    runner = SimpleNamespace(model=SimpleNamespace(load_weights=sink))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    generation.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None
    )
    return generation


def sink_of(model, device):
    largest = max(each.numel() for each in model.parameters())
    buffer = torch.empty(largest, dtype=torch.bfloat16, device=device)

    def load_weights(weights):
        for _, weight in weights:
            buffer[: weight.numel()].copy_(weight.flatten())

    return load_weights


@torch.no_grad()
def check_exact(model):
    """Every pushed weight is W + delta, dithered, to the bit."""
    layers = {name: each for name, each in model.named_modules() if hasattr(each, "lora_A") and each.lora_A}
    wanted = {name.removeprefix("base_model.model.") + ".weight": each for name, each in layers.items()}
    pushed = different = 0
    with merged_beside(model):
        for name, weight in into_a_sink(model, None)._iter_named_params():
            if name in wanted:
                layer = wanted[name]
                delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
                different += not torch.equal(weight, dithered(layer.base_layer.weight.float() + delta, torch.bfloat16))
                pushed += 1
    say(f"exact: {pushed} merged weights pushed of {len(wanted)} layers, {different} differ from W + delta, dithered")


def into_vllm(model, shape, share):
    from accelerate import Accelerator

    folder = tempfile.mkdtemp()
    model.get_base_model().config.architectures = ["Qwen2ForCausalLM"]
    model.get_base_model().config.save_pretrained(folder)
    model.get_base_model().name_or_path = folder
    options = {"enforce_eager": True, "load_format": "dummy", "dtype": "bfloat16", "seed": 0}
    options["skip_tokenizer_init"] = True
    return SalesVLLMGeneration(
        model, Accelerator(), None, engine_options=options, mode="colocate", gpu_memory_utilization=share,
        max_model_length=min(1024, shape["max_position_embeddings"]), max_num_seqs=8,
    )  # fmt: skip


@torch.no_grad()
def check_engine(generation, model):
    """vLLM holds the merged weight of one layer."""
    engine = generation.llm.llm_engine.model_executor.driver_worker
    held = dict(getattr(engine, "worker", engine).model_runner.model.named_parameters())
    name = "model.layers.1.mlp.down_proj"
    layer = model.get_submodule(f"base_model.model.{name}")
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    wanted = dithered(layer.base_layer.weight.float() + delta, torch.bfloat16)
    found = held[f"{name}.weight"]
    is_equal = torch.equal(found, wanted) if found.numel() else "not readable, as vLLM packs weights on a CPU"
    say(f"vLLM's {name}.weight is W + delta, dithered: {is_equal}")


def attempt(what, run):
    try:
        return run()
    except Exception:
        say(f"FAILED: {what}\n{traceback.format_exc()}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--without_vllm", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.35, help="gpu_memory_utilization of vLLM")
    args = parser.parse_args()
    shape = SMALL if args.small else SEVEN_B
    cuda = args.device == "cuda"
    say("torch", torch.__version__, "peft", peft.__version__, torch.cuda.get_device_name() if cuda else "CPU")
    model = build(shape, args.device)
    say(
        f"{sum(each.numel() for each in model.parameters()) / 1e9:.2f} B weights, "
        f"{sum(each.numel() for each in model.parameters() if each.requires_grad) / 1e6:.1f} M of them LoRA"
    )
    attempt("exactness", lambda: check_exact(model))
    sink = into_a_sink(model, sink_of(model, args.device))
    attempt("a sink that copies", lambda: measure("a sink that copies", sink, model, args.device, args.repeats))

    def with_engine():
        generation = into_vllm(model, shape, args.share)
        say("vLLM is there")
        measure("colocated vLLM", generation, model, args.device, args.repeats)
        check_engine(generation, model)

    if not args.without_vllm:
        attempt("colocated vLLM", with_engine)

    def with_dora():
        dora = adapted(model.unload(), use_dora=True)
        sink.model = dora
        measure("DoRA, a sink that copies", sink, dora, args.device, 3, warm=1)

    attempt("DoRA", with_dora)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    say("done")
    os._exit(0)  # vLLM's engine needs no tidy end here


if __name__ == "__main__":
    main()
