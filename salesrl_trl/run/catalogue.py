"""The faults that users meet: what each looks like, its cause, and what to do.

Owns what a fault is (`Fault`), the table of faults (`FAULTS`) and its page. `last_words` recognises a fault by the
table, and `python -m salesrl_trl.run.catalogue` prints docs/TROUBLESHOOTING.md. The first fault with a fitting sign
counts, so a special fault stands before a general one. Standard library only.
"""

from collections.abc import Iterable
from dataclasses import dataclass

PAGE = "docs/TROUBLESHOOTING.md"  # the page of all faults, which `page` makes


@dataclass(frozen=True)
class Sign:
    """How an error is recognised: every field given must fit. Without `kind` and `where`, the log is searched too."""

    text: str = ""  # regular expression for the error's message
    kind: str = ""  # name of the error's class or of a base, with or without modules before it
    where: str = ""  # regular expression for `module.function` of a frame that the error passed: the phase of the run
    status: int = 0  # number of the signal that ended the process; with it `text` is searched in the log alone


class Fault:
    """A fault, and what to do, the cheapest first. `follows`: whether another process's error is the cause."""

    def __init__(self, title: str, cause: str, signs: tuple[Sign, ...], *remedies: str, follows: bool = False) -> None:
        self.title, self.cause, self.signs, self.remedies, self.follows = title, cause, signs, remedies, follows

    @property
    def anchor(self) -> str:
        """The heading's name in a link, as GitHub makes it."""
        return "".join(letter for letter in self.title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def page(faults: Iterable[Fault]) -> str:
    """The text of `PAGE`, by title."""
    ordered = sorted(faults, key=lambda fault: fault.title)
    parts = [
        "# Troubleshooting",
        "A run that fails ends with its last words: the error, its cause, and what to do, in this order. They are the "
        "last lines of the console, and stand in `OUTPUT_DIR/run.log`. This page holds all that are known. It is made "
        f"by `python -m salesrl_trl.run.catalogue > {PAGE}`, from the table by which a run recognises them.",
        "For a run that hangs: the last `[Heartbeat]` line names the phase ([TIMING.md](TIMING.md)).",
        "\n".join(f"- [{fault.title}](#{fault.anchor})" for fault in ordered),
    ]
    for fault in ordered:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(fault.remedies, 1))
        parts += [f"## {fault.title}", fault.cause, f"Recognised by: {'; '.join(map(_shown, fault.signs))}.", steps]
    return "\n\n".join(parts) + "\n"


def _shown(sign: Sign) -> str:
    parts = {"error": sign.kind, "message": sign.text, "raised in": sign.where, "signal": sign.status}
    return ", ".join(f"{name} `{value}`" for name, value in parts.items() if value)


@dataclass(frozen=True)
class Words:
    """The last words of one process."""

    text: str
    code: int  # exit code
    follows: bool = False  # whether the error follows from that of another process, which then is the one to report


_OUT_OF_MEMORY = "torch.OutOfMemoryError"
_TOO_FEW = "TooFewRewardsError"
_WHO = "`python scripts/check_gpu_memory.py` with your settings shows what the run needs, and who holds memory now."
_LESS_FOR_VLLM = "Give vLLM less: `--vllm_gpu_memory_utilization 0.25`, or `--vllm_enable_sleep_mode true`."
_SERVER = "Split vLLM over GPUs: `--vllm_tensor_parallel_size 2`, or take a server: `--vllm_mode server`."
_DOWN = r"(unavailable|timeout|breaker_open|http_5\d\d)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "No room on the GPU on resume",
        "The checkpoint's weights and optimizer state are read beside those that are loaded already, and beside vLLM.",
        (Sign(kind=_OUT_OF_MEMORY, where=r"load_from_checkpoint|load_optimizer|load_checkpoint|load_state_dict"),),
        _WHO,
        _LESS_FOR_VLLM,
        "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, so that freed pieces can be used together.",
        "Take more processes than before with ZeRO-3 or FSDP: each holds a share.",
    ),
    Fault(
        "vLLM has no room for its KV cache",
        "vLLM's share of the memory is used up by weights, or is too small for one completion of the longest length.",
        (
            Sign(r"No available memory for the cache blocks|larger than the available KV cache memory"),
            Sign(r"allocation is less than requested memory for kv"),
        ),
        "Allow shorter sequences: `--vllm_max_model_length 2048` (prompt and completion together).",
        "Give vLLM more: `--vllm_gpu_memory_utilization 0.45`; on a CPU `VLLM_CPU_KVCACHE_SPACE`, in free GiB.",
        "Free memory for it: `--vllm_enable_sleep_mode true`, `--use_peft true --lora_r 16`.",
        _SERVER,
    ),
    Fault(
        "No room for vLLM on the GPU",
        "vLLM's weights do not fit, or its share is more than what is free: the policy, or another process, has it.",
        (
            Sign(r"Free memory on device .* is less than desired GPU memory utilization"),
            Sign(kind=_OUT_OF_MEMORY, where=r"^vllm\."),
        ),
        _WHO,
        _LESS_FOR_VLLM,
        "Train less: `--use_peft true --lora_r 16`.",
        _SERVER,
    ),
    Fault(
        "vLLM's longest sequence is longer than the model's",
        "`vllm_max_model_length` is more than the positions that the model was made for.",
        (Sign(r"max_model_len .*is greater than the derived max_model_len"),),
        "Set `--vllm_max_model_length` to the model's `max_position_embeddings`, which its config.json names.",
    ),
    Fault(
        "No room on the GPU in training",
        "Weights, gradients, optimizer state, activations and vLLM together are more than the GPU has.",
        (Sign(kind=_OUT_OF_MEMORY), Sign(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")),
        _WHO,
        "Compute activations twice instead of keeping them: `--gradient_checkpointing true`.",
        "Halve `--per_device_train_batch_size`, double `--gradient_accumulation_steps`: the update is the same.",
        _LESS_FOR_VLLM,
        "Shorten completions and prompts: `--max_completion_length`, `--max_prompt_tokens`.",
        "Train less: `--use_peft true --lora_r 16`, or take the card's `--preset`, for example `24gb`.",
        "Split the state over GPUs: `accelerate launch --config_file accelerate_configs/full.yaml`.",
    ),
    Fault(
        "No room in shared memory",
        "/dev/shm is full or small. NCCL, vLLM's workers and loader workers exchange data there. Docker gives 64 MB.",
        (Sign(r"/dev/shm|out of shared memory|shared memory segment|killed by signal: Bus error"), Sign(status=7)),
        "See `df -h /dev/shm`, and remove files there that no process of yours uses.",
        "Give a container more: `docker run --shm-size 16g`; in Kubernetes an `emptyDir` with `medium: Memory`.",
        "Use less of it: `--dataloader_num_workers 0`; `NCCL_SHM_DISABLE=1` in the environment.",
    ),
    Fault(
        "The disk is full",
        "A checkpoint, a cache or the log could not be written.",
        (
            Sign(r"No space left on device|Disk quota exceeded|database or disk is full"),
            Sign(r"PytorchStreamWriter failed writing|inline_container.* unexpected pos|GiB of free disk"),
        ),
        "See `df -h` and `df -i` for the disk in the message; `du -sh runs/* ~/.cache/*` shows what is large.",
        "Keep fewer checkpoints: `--save_total_limit 1`, or without optimizer state: `--save_only_model true`.",
        "Write elsewhere: `--output_dir /larger/disk/run`; caches follow `HF_HOME`, `VLLM_CACHE_ROOT`, `TMPDIR`.",
        "Go on from the last whole checkpoint: `--resume_from_checkpoint auto`.",
    ),
    Fault(
        "Too many open files",
        "Connections to services and files of workers are more than this process may have open.",
        (Sign(r"Too many open files"),),
        "Allow more in the shell that launches: `ulimit -n 65536`; in a container `--ulimit nofile=65536`.",
        "Use fewer: `--rag_max_concurrency`, `--judge_max_concurrency`, `--dataloader_num_workers 0`.",
    ),
    Fault(
        "No more threads or processes",
        "The user or the container has reached its limit of processes.",
        (Sign(r"can't start new thread|Resource temporarily unavailable"),),
        "Allow more: `ulimit -u unlimited`; in a container `--pids-limit -1`.",
        "Use fewer: `OMP_NUM_THREADS=1`, `--dataloader_num_workers 0`.",
    ),
    Fault(
        "No room in the host's memory",
        "The machine's memory, or the container's limit, is used up. The kernel may end the run with SIGKILL.",
        (
            Sign(kind="MemoryError"),
            Sign(r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory"),
            Sign(status=9),
        ),
        "See `free -g` and `dmesg | grep -i oom` for who used it up.",
        "Use less: `--dataloader_num_workers 0`; on a CPU a smaller `VLLM_CPU_KVCACHE_SPACE` (GiB).",
        "Offload nothing in the accelerate configuration.",
    ),
    Fault(
        "No working attention backend",
        "The attention that was asked for is not installed, does not exist, or does not run on this device.",
        (
            Sign(r"FlashAttention\S* has been toggled on|attn_implementation=.* is not supported"),
            Sign(r"(Unknown|No valid) attention backend|attention backend .* (is not valid|does not have)"),
            Sign(r"FlashAttention only supports Ampere"),
        ),
        "For training take torch's own: `--attn_implementation sdpa`, which always works.",
        "For vLLM leave the choice to it: remove `attention_backend` from `--vllm_engine_kwargs`. vLLM does not "
        "read `VLLM_ATTENTION_BACKEND` any more.",
        "For FlashAttention: `scripts/install_flash_attn.sh`. It needs an Ampere GPU or later, and `bf16: true`.",
    ),
    Fault(
        "A kernel does not compile",
        "Triton, torch.compile and DeepSpeed compile on the machine that they run on. It needs gcc, g++ and Python.h.",
        (
            Sign(r"Failed to find C(\+\+)? compiler|There is no \S+ compiler|No working C\+\+ compiler"),
            Sign(r"Python\.h: No such file|Error building extension|Ninja is required|Error compiling objects"),
            Sign(kind="torch._inductor.exc.InvalidCxxCompiler"),
            Sign(kind="torch._inductor.exc.CppCompileError"),
            Sign(kind="triton.compiler.errors.CompilationError"),
            Sign(kind="torch._dynamo.exc.BackendCompilerFailed"),
        ),
        "Install the compilers: `apt install build-essential python3-dev`; others are named by `CC` and `CXX`.",
        "Do without: `--vllm_engine_kwargs '{\"enforce_eager\": true}'`, `--torch_compile false`.",
        "Remove a half-written cache, by default `~/.triton/cache` or `~/.cache/vllm/torch_compile_cache`.",
    ),
    Fault(
        "The GPU's driver does not fit",
        "The driver is older than the CUDA of the installed torch, or torch has no kernels for this GPU.",
        (
            Sign(r"driver on your system is too old|driver version is insufficient"),
            Sign(r"no kernel image is available|provided PTX was compiled with an unsupported toolchain"),
            Sign(r"Found no NVIDIA driver|has no kernels for this GPU"),
        ),
        'Compare `nvidia-smi` (driver) with `python -c "import torch; print(torch.version.cuda, '
        'torch.cuda.get_arch_list())"`.',
        "Install a newer driver, or the compatibility package of CUDA (`cuda-compat`).",
        "Try the settings on the CPU meanwhile: `accelerate launch --cpu`.",
    ),
    Fault(
        "The port is taken",
        "Another run, or one that has not ended, listens at the port of the process group.",
        (Sign(r"EADDRINUSE|[Aa]ddress already in use|that port of this machine is in use"),),
        "Take a free port: `accelerate launch --main_process_port 0`. Without it several GPUs take 29500.",
        "For a vLLM server, which gets its weights through another port: `--vllm_group_port 51217`.",
        "Find who has it: `ss -ltnp | grep 29500`.",
    ),
    Fault(
        "Processes waited too long for each other",
        "A collective, or the push of weights into vLLM, did not end: a process hangs, is late, or died unseen.",
        (
            Sign(r"Watchdog caught collective operation timeout"),
            Sign(r"Timed out waiting \d+ms for (recv|send) operation|Timed out after \d+ seconds waiting for clients"),
            Sign(r"\[Heartbeat\] .*: weight_push for \d{3,} s", status=9),
            Sign(r"wait timeout after \d+ms|client socket has timed out after"),
        ),
        "The last `[Heartbeat]` line of run.log names the phase; `py-spy dump --pid PID` shows the place.",
        "Hold rewards under the limit: `--reward_deadline_s` below `--ddp_timeout`.",
        "Give slow disks and first compilations more time: `--ddp_timeout 3600`.",
        "Between GPUs: `NCCL_DEBUG=INFO` names the link that fails; `NCCL_P2P_DISABLE=1` and `NCCL_IB_DISABLE=1` "
        "try without it; `NCCL_SOCKET_IFNAME` chooses the network.",
        "For a vLLM server: restart it. Its group with the trainer is not made twice.",
    ),
    Fault(
        "Another process of the run ended first",
        "This process lost its partner. The first error is the partner's.",
        (
            Sign(r"gloo.*(Connection closed|reset by peer|Broken pipe)|Connection closed by peer"),
            Sign(r"ncclRemoteError|remote process exited|NCCL communicator was aborted"),
        ),
        "Look above in run.log, and on the other machines, for the first traceback. Without one: `dmesg`.",
        follows=True,
    ),
    Fault(
        "A worker of vLLM or Ray does not start",
        "vLLM's engine or one of its workers ended while it started. Its own lines are above, in run.log.",
        (
            Sign(
                r"Engine core initialization failed|WorkerProc initialization failed|EngineCore encountered an issue"
            ),
            Sign(kind="EngineDeadError"),
            Sign(r"Failed to import Ray|No module named 'ray'|Cannot provide a placement group"),
            Sign(kind="ray.exceptions.RayError"),
        ),
        "Look in run.log for the first error of `EngineCore` or `Worker`: it is the cause.",
        "Start with less: `--vllm_gpu_memory_utilization 0.25`, `--vllm_engine_kwargs "
        """'{"enforce_eager": true}'`.""",
        "vLLM needs no Ray on one machine: leave `distributed_executor_backend` out of `--vllm_engine_kwargs`.",
    ),
    Fault(
        "A worker of the data loader died",
        "A worker process ended, mostly for want of memory.",
        (Sign(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)"),),
        "Load in the process itself, where the error is shown: `--dataloader_num_workers 0`.",
        "See `free -g` and `df -h /dev/shm`.",
    ),
    Fault(
        "The data loader is slow",
        "Steps wait for rows: `[Heartbeat] ... data_loading for ...`, and a large `time/data_loading_s`.",
        (Sign(r"\[Heartbeat\] .*: data_loading for \d{2,} s", status=9),),
        "Load beside the step: `--dataloader_num_workers 4 --dataloader_prefetch_factor 2`.",
        "Keep workers over epochs: `--dataloader_persistent_workers true`.",
        "Copy the dataset to a local disk; Parquet is read faster than JSON Lines.",
    ),
    Fault(
        "A service refuses the key",
        "A RAG service or judge answered 401, 402 or 403: no key, a wrong one, or a used-up quota.",
        (
            Sign(kind="AccessDenied"),
            Sign(r"refused the key|answered 40[123]", kind="ServiceError"),
            Sign(r"_http_40[123]|_quota", kind=_TOO_FEW),
        ),
        "Check the variable that `--judge_api_key_env` or `--rag_api_key_env` names: is it exported, and whole?",
        'Try the key alone: `curl -H "Authorization: Bearer $JUDGE_API_KEY" ADDRESS/models`.',
        "For a quota: raise it, or add to `--judge_providers`; then `--resume_from_checkpoint auto`.",
    ),
    Fault(
        "The budget is spent",
        "A limit is reached: `max_calls`, `max_usd`, or those of all providers in `judge_providers`.",
        (Sign(r"the budget is spent"),),
        "Raise the limit that the message names, and go on as it says.",
    ),
    Fault(
        "A service limits calls",
        "A RAG service or judge answered 429 until the deadline.",
        (Sign(kind="ServiceOverloaded"), Sign(r"_http_(429|529)", kind=_TOO_FEW)),
        "Call less at once: `--judge_max_concurrency`, `--rag_max_concurrency`, `--initial_concurrency`.",
        "Wait longer: `--reward_deadline_s`, with `--rollout_lookahead 2` to hide the time.",
        "Get more capacity, or another provider in `--judge_providers`.",
    ),
    Fault(
        "The RAG service does not answer",
        "Nothing listens at `rag_base_url`, it answers with errors, or a proxy stands between.",
        (
            Sign(r"RAG service", kind="ServiceUnavailable"),
            Sign(r"RAG service", kind="ServiceTimeout"),
            Sign(rf"rag_(8b|32b)_{_DOWN}", kind=_TOO_FEW),
        ),
        "Ask it from this machine: `curl -i ADDRESS/healthz`. `NO_PROXY` keeps a proxy out of the way.",
        "Check both endpoints: `python scripts/test_rag_endpoints.py --base-url ADDRESS`.",
        "Bear outages: `--outage_patience_s 300`, `--max_attempts 4`, `--rag_timeout_s 60`.",
        "With the demo's rows and rubrics: leave `--rag_base_url` out to use the embedded service.",
    ),
    Fault(
        "The judge gives no verdict",
        "The judge is up and answers, but not with the JSON object of a verdict.",
        (
            Sign(kind="JudgeInvalid"),
            Sign(
                r"the judge('s message| answered| broke off|, or its)|the verdict does not|_tokens` was used up",
                kind="ServiceUnavailable",
            ),
            Sign(r"judge\w*_(not_json|outside_schema|no_reference|empty|cut_off|unsigned|refused)", kind=_TOO_FEW),
        ),
        "Ask it for one by hand: does it keep to `response_format`? Some services take another model's name silently.",
        "Take a model that keeps to JSON, or give an entry of `--judge_providers` `response_format: text`.",
        "Leave a model that thinks more room: `max_completion_tokens` of that entry.",
        "Judge otherwise: `--judge my_package.MyJudge` reads what your service answers.",
    ),
    Fault(
        "The judge does not answer",
        "Nothing listens at `judge_base_url`, it answers with errors, or too late.",
        (
            Sign(r"judge", kind="ServiceUnavailable"),
            Sign(r"judge", kind="ServiceTimeout"),
            Sign(rf"judge\w*_{_DOWN}", kind=_TOO_FEW),
        ),
        "Ask it from this machine: `curl -i ADDRESS/models`. The address ends with `/v1`.",
        "Give it time or fewer calls: `--judge_timeout_s`, `--judge_max_concurrency`.",
        "With the demo's rows and rubrics: leave `--judge_base_url` out to use the embedded judge.",
    ),
    Fault(
        "The vLLM server does not answer",
        "`vllm_mode: server` is set and no server answers at its address.",
        (Sign(r"vLLM server", kind="ServiceUnavailable"),),
        "Start the server; docs/PIPELINE.md has its command. `curl -i ADDRESS/health` must answer 200.",
        "Correct `--vllm_server_base_url`, or give it time: `--vllm_server_timeout 600`.",
        "Generate in the training process: `--vllm_mode colocate`.",
    ),
    Fault(
        "Completions do not end",
        "The token that ends a turn of the chat template is no end token of the model: completions are cut off.",
        (Sign(r"which ends no completion|has an end token: every completion"),),
        "See the banner's line `end tokens`: it must name the template's, for example `<|im_end|>`.",
        "Add the token's id to `eos_token_id` in the model's generation_config.json.",
        "Take the instruct model with its own tokenizer, not the base model.",
    ),
    Fault(
        "Training blew up",
        "Gradients or the KL are no finite numbers any more: the weights are broken from there on.",
        (Sign(kind="DivergedError"),),
        "Go back to a checkpoint before the first bad step: `--resume_from_checkpoint DIR`, or `best/`.",
        "Learn more slowly: a third of `--learning_rate`, `--warmup_steps 20`, `--max_grad_norm 0.2`.",
        "Hold the policy nearer: a lower band in `--branch_kl`, or a higher `--beta`.",
        "Keep the clamp: `--kl_log_ratio_clamp 10`; take no fp16.",
    ),
    Fault(
        "vLLM samples from other weights",
        "Log-probs of vLLM and of the trainer differ: a push did not reach vLLM, or the formats differ.",
        (Sign(kind="WeightSyncError"),),
        'Start vLLM from the checkpoint: `--vllm_engine_kwargs \'{"load_format": "auto"}\'`; on a CPU do not tie '
        "the output head.",
        "Compute in one format: leave `dtype` out of `--vllm_engine_kwargs`.",
        "If the difference is small and known: `--max_sampling_logp_difference 1.0`.",
    ),
    Fault(
        "A lock of an interrupted build is left",
        "A build of a DeepSpeed operator was interrupted. Every later run waits silently for its lock.",
        (Sign(r"a build of DeepSpeed was interrupted"),),
        "Remove the file that the message names, by default under `~/.cache/torch_extensions`.",
    ),
    Fault(
        "The model is gated",
        "The hub gives this model only to accounts that were admitted.",
        (Sign(kind="GatedRepoError"), Sign(r"gated repo")),
        "Ask for access on the model's page, then `hf auth login`, or set `HF_TOKEN`.",
        "Copy it from a machine that has it, and name the folder: `--model_name_or_path DIR`.",
    ),
    Fault(
        "The hub cannot be reached",
        "A model or dataset is neither on this machine nor can it be fetched.",
        (
            Sign(kind="OfflineModeIsEnabled"),
            Sign(r"the hub can't be reached", kind="ModelNotFoundError"),
            Sign(kind="LocalEntryNotFoundError"),
            Sign(r"couldn't connect to 'https://|Couldn't reach .* on the Hub|outgoing traffic has been disabled"),
        ),
        "Take `HF_HUB_OFFLINE` out of the environment; set `HTTPS_PROXY`, or `HF_ENDPOINT` for a mirror.",
        "Fetch it where there is a network: `hf download NAME --local-dir DIR`, then `--model_name_or_path DIR`.",
    ),
    Fault(
        "The model is not found",
        "`model_name_or_path` is neither a folder with a model nor a name on the hub.",
        (Sign(kind="ModelNotFoundError"),),
        "Correct `--model_name_or_path`: a folder holds config.json, the weights and the tokenizer.",
        "Leave it out to train the small demo policy.",
    ),
    Fault(
        "A file of weights is damaged",
        "A download or a copy was cut off, or Git LFS left a pointer in place of the file.",
        (Sign(kind="SafetensorError"), Sign(r"PytorchStreamReader failed|invalid load key")),
        "Look at sizes: `ls -l DIR/*.safetensors`. A file of 130 bytes is a pointer: `git lfs pull`.",
        "Fetch it again: `hf download NAME --local-dir DIR --force-download`.",
        "A damaged checkpoint: `--resume_from_checkpoint` with the one before.",
    ),
)
"""In the order in which they are tried."""


if __name__ == "__main__":
    print(page(FAULTS), end="")
