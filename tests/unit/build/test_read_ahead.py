"""Files are read into the page cache before they are asked for."""

import threading
from types import SimpleNamespace

import pytest

from salesrl_trl.launch import plan as module
from salesrl_trl.launch.plan import begin_read_ahead, read_ahead, weight_files
from salesrl_trl.timing import TimingContext


@pytest.fixture
def model(tmp_path):
    for number in range(6):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(1000))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_all_weights_of_a_folder_are_read_if_they_fit_into_free_memory(model, monkeypatch):
    files = weight_files(str(model))
    assert [file.name for file in files] == [f"model-{number}.safetensors" for number in range(6)]
    assert read_ahead(files) == 6000
    assert weight_files("nobody/has-this-model") == []
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=5999))
    assert read_ahead(files) == 0


def test_a_file_that_cannot_be_read_is_told_by_other_code(model):
    (model / "model-3.safetensors").unlink()
    (model / "model-3.safetensors").mkdir()
    ended = threading.Event()
    begin_read_ahead(str(model), None, TimingContext("read_ahead", SimpleNamespace(add=lambda spans: ended.set())))
    assert ended.wait(10)
