"""The installer of FlashAttention: what it says before it begins, what it builds, and what it takes for installed."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/install_flash_attn.sh"
PYTHON = """#!/usr/bin/env bash
# Stands for the environment's Python on a machine with an H100: no wheel anywhere, and a build that ends well.
case "$1" in
  -) cat >/dev/null; [[ -e "$COMPUTES" ]] && echo 2.8.3 ;;
  -c) echo "9.0 130" ;;
  -m)
    [[ "$*" != *only-binary* ]] || exit 1
    skipped="${FLASH_ATTENTION_SKIP_CUDA_BUILD:-}"
    printf '%s' "$3 $FLASH_ATTN_CUDA_ARCHS $MAX_JOBS $skipped $NVCC_APPEND_FLAGS;" >>"$CALLS"
    echo "Building from source"
    [[ -n "$skipped" ]] || touch "$BUILT"
    ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    def run(*, has_nvcc=True, computes=False, build_computes=True):
        made = {"venv/bin/python": PYTHON} | ({"cuda/bin/nvcc": "#!/bin/sh\n"} if has_nvcc else {})
        for name, text in made.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        works, calls = tmp_path / "works", tmp_path / "calls"
        calls.write_text("")
        if computes:
            works.touch()
        places = {
            "VENV": tmp_path / "venv", "CUDA_HOME": tmp_path / "cuda", "TMPDIR": tmp_path, "COMPUTES": works,
            "BUILT": works if build_computes else tmp_path / "broken", "CALLS": calls,
        }  # fmt: skip
        given = {**os.environ, **{name: str(place) for name, place in places.items()}, "MAX_JOBS": "4"}
        given.pop("NVCC_APPEND_FLAGS", None)
        folders = given["PATH"].split(":")
        given["PATH"] = ":".join(each for each in folders if not (Path(each) / "nvcc").exists())
        found = subprocess.run(["bash", SCRIPT], env=given, capture_output=True, text=True, timeout=60)
        return found, calls.read_text().split(";")[:-1]

    return run


def test_a_build_is_for_this_card_alone_and_its_time_is_said_before(install):
    found, calls = install()
    assert found.returncode == 0
    # 73 files of 270 s by 4 compilers, and 300 s for the last ones: (19,710 / 4 + 300) / 60 = 87 minutes
    assert "it is built for sm_90: about 87 minutes with 4 compilers at a time" in found.stdout
    assert calls == ["install 90 4   -DFLASHATTENTION_DISABLE_ALIBI"]
    assert "(2.8.3) is there: built here for sm_90" in found.stdout


def test_without_a_compiler_it_says_so_before_and_leaves_nothing_behind(install):
    found, calls = install(has_nvcc=False)
    assert found.returncode == 1
    assert "Without one, this stops, as nvcc is required to build it" in found.stdout
    assert [call.split()[0] for call in calls] == ["install", "uninstall"]
    assert "TRUE" in calls[0]


def test_what_does_not_compute_as_sdpa_is_not_installed(install):
    found, _ = install(build_computes=False)
    assert found.returncode == 1
    assert "FlashAttention could not be installed" in found.stderr
    found, calls = install(computes=True)
    assert found.returncode == 0
    assert "it was installed already" in found.stdout
    assert not calls
