"""GGUF models: what is loaded is what the file holds, and a file that cannot be converted gets one line."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoTokenizer

from decode.common.errors import UserError
from decode.model.formats import gguf_files, gguf_reader
from decode.model.formats.gguf_files import SOURCE_FILE, gguf_folder
from decode.model.formats.gguf_tokenizers import PRE_TOKENIZERS
from decode.model.loading import load_model, load_target
from tests.decode.common.test_errors import largest_file
from tests.gguf_writer import ENDING, TEMPLATE, Case, case_model, write_case, write_file

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "target"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path, **options: Any) -> Path:
    """A tiny Llama as a GGUF; widths are multiples of 32, the block of Q4_1 and Q8_0."""
    return write_case(path, Case(), **options)


def test_an_unquantised_file_gives_the_model_itself(tmp_path: Path) -> None:
    model = case_model(Case())
    target = load_target(str(write_gguf(tmp_path / "tiny.gguf")), "cpu")
    loaded = target.runner.model.state_dict()
    assert set(loaded) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    assert target.eos == {ENDING}
    assert target.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Q8_0", "float32"), ("Q4_1", "bfloat16"), ("F16", "float16"), ("F32", "bfloat16"), ("Q8_0", "float16")],
)  # fmt: skip
def test_weights_are_those_of_the_quantisation_rounded_once(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches numbers of another dtype's folder, chunks in the wrong place, and rows of heads that are cut apart."""
    # Chunks of 24 rows, or of 16 where heads count
    monkeypatch.setattr(gguf_reader, "CHUNK", 64 * 24)
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    number_type, quantised = getattr(torch, dtype), gguf.GGMLQuantizationType[kind]
    for other in ("float32", dtype):  # the second one beside the first one's folder
        got = load_model(str(path), "target", "cpu", other).state_dict()
    for name, value in case_model(Case()).state_dict().items():
        wanted = value
        if value.ndim == 2:  # blocks lie within rows, whose order does not matter
            wanted = torch.from_numpy(
                gguf.dequantize(gguf.quantize(value.numpy(), quantised), quantised)
            )
        assert got[name].dtype == number_type
        assert torch.equal(got[name], wanted.to(number_type)), name


def test_the_folder_is_made_once_and_says_where_it_comes_from(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = gguf_folder(str(file))
    assert folder is not None
    note = json.loads((Path(folder) / SOURCE_FILE).read_text())
    assert note["file"] == "tiny.gguf"
    assert note["licence"] == "apache-2.0"
    assert Path(folder).name == f"{note['sha256'][:16]}-v{gguf_files.FORMAT}"
    assert not list(Path(folder).glob("*.safetensors"))  # asked for config and tokenizer alone
    whole = Path(gguf_folder(str(file), dtype=torch.bfloat16) or "")
    made = (whole / "model.safetensors").stat().st_mtime_ns
    # Its folder means the same
    assert gguf_folder(str(tmp_path), dtype=torch.bfloat16) == str(whole)
    assert (whole / "model.safetensors").stat().st_mtime_ns == made
    assert {p.name for p in whole.parent.iterdir()} == {Path(folder).name, whole.name}
    assert gguf_folder(str(file), dtype=torch.float32) != str(whole)


def test_texts_are_cut_as_the_vocabulary_was_made(tmp_path: Path) -> None:
    text = "x = 12\n\n1. two  3"
    plain = load_target(str(write_gguf(tmp_path / "a.gguf")), "cpu").tokenizer
    digits = load_target(str(write_gguf(tmp_path / "b.gguf", pre="smollm")), "cpu")
    bundled = AutoTokenizer.from_pretrained(ASSETS)
    assert digits.tokenizer(text).input_ids == bundled(text).input_ids
    cut = [piece for piece, _ in plain.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    alone = digits.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "Ġ12" in cut
    assert {"1", "2", "3"} <= {piece for piece, _ in alone}


@pytest.mark.parametrize(
    ("text", "pre", "pieces"),
    [
        ("a 1234", "qwen2", ["a", "Ġ", "1", "2", "3", "4"]),
        ("a 1234", "llama-bpe", ["a", "Ġ", "123", "4"]),
        ("a 12 b", "gpt-2", ["a", "Ġ12", "Ġb"]),
        ("a\n\n1", "smollm", ["a", "ĊĊ", "1"]),
        ("a\n\n1", "gpt-2", ["a", "Ċ", "Ċ", "1"]),
    ],
)
def test_pre_tokenizers(text: str, pre: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == pieces


def test_files_that_cannot_be_converted_get_one_line(tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    nan = {"output_norm.weight": np.full(64, np.nan)}
    for name, content, said in (
        ("truncated", whole[: len(whole) // 2], "cannot be converted"),
        ("no header", b"GGUF" + bytes(40), "cannot be converted"),
        ("another format", b"PK\x03\x04" + bytes(100), "cannot be converted"),
        ("empty", b"", "cannot be converted"),
        ("cut", {"pre": "no-such"}, "no-such.*original folder"),
        ("less", {"skip": "blk.1.ffn_up"}, r"lacks 1 weights \(model.layers.1.mlp.up_proj"),
        ("adapter", {"plain_keys": {"general.type": "adapter"}}, "of the kind 'adapter'"),
        ("nan", {"tensors": nan}, "output_norm.weight holds numbers that are not finite"),
    ):
        file = tmp_path / f"{name}.gguf"
        write_gguf(file, **content) if isinstance(content, dict) else file.write_bytes(content)
        with pytest.raises(UserError, match=f"^.*{said}.*$"):
            gguf_folder(str(file), dtype=torch.float32 if name == "nan" else None)
    write_file(tmp_path / "unknown.gguf", "no-such", {}, {})
    for name, said in (
        ("unknown.gguf", "architecture 'no-such'; llama, qwen2.*original folder"),
        ("", "one .gguf file, or name one"),
        ("absent.gguf", "does not exist"),
    ):
        with pytest.raises(UserError, match=said):
            gguf_folder(str(tmp_path / name))
    assert not list(cache.rglob("*.safetensors"))  # nothing half made stays


def test_a_model_folder_and_a_hub_name_are_no_gguf(tmp_path: Path) -> None:
    assert gguf_folder(str(ASSETS)) is None
    assert gguf_folder("owner/model") is None


def split(tmp_path: Path, parts: int = 3) -> list[Path]:
    folder = tmp_path / "split"
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "tiny.gguf", parts=parts)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("parts", [2, 9])
def test_a_split_file_is_the_whole_one(parts: int, tmp_path: Path) -> None:
    """Catches a part that is left out, and a model that is built from one."""
    wanted = case_model(Case()).state_dict()
    files = split(tmp_path, parts)
    assert len(files) == parts
    folders = {gguf_folder(str(name), dtype=torch.float32) for name in (*files, files[0].parent)}
    assert len(folders) == 1
    got = load_file(Path(str(folders.pop())) / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_is_named(lost: int, tmp_path: Path, cache: Path) -> None:
    files = split(tmp_path)
    files[lost].unlink()
    for name in (files[lost].parent, files[lost - 1]):
        with pytest.raises(UserError, match=f"3 parts of a file, and {files[lost].name} is not"):
            gguf_folder(str(name))
    assert not list(cache.rglob("*.json"))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, cache: Path) -> None:
    """Catches a part of another split, a part twice, a part alone under another name, and a whole file as a part."""
    files = split(tmp_path)
    contents = [file.read_bytes() for file in files]
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "b").mkdir()
    two = [file.read_bytes() for file in split(tmp_path / "b", 2)]
    for number, content in ((1, contents[2]), (0, contents[1]), (1, two[1]), (2, whole)):
        files[number].write_bytes(content)
        with pytest.raises(UserError, match="says that it is part"):
            gguf_folder(str(files[0]))
        files[number].write_bytes(contents[number])
    alone = tmp_path / "alone.gguf"
    for content in contents[:2]:
        alone.write_bytes(content)
        with pytest.raises(UserError, match="says that it is part . of 3"):
            gguf_folder(str(alone))
    assert not list(cache.rglob("*.json"))


def test_two_split_files_in_a_folder_are_two(tmp_path: Path) -> None:
    files = split(tmp_path)
    write_gguf(files[0].with_name("other.gguf"), parts=2)
    with pytest.raises(UserError, match="must hold one .gguf file, or name one of them"):
        gguf_folder(str(files[0].parent))
    assert gguf_folder(str(files[1])) is not None


@pytest.mark.parametrize(
    ("number", "place"),
    [
        (errno.ENOSPC, "write_safetensors"),
        (errno.EDQUOT, "_save_tokenizer"),
        (errno.EROFS, "write_safetensors"),
    ],
)
def test_a_disk_that_takes_no_more_is_named(
    number: int, place: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches "download it again" for a file that is whole."""
    path = write_gguf(tmp_path / "tiny.gguf")

    def full(*_: Any) -> None:
        if place == "_save_tokenizer":  # as the tokenizers library says it
            raise Exception(f"{os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(gguf_files, place, full)
    with pytest.raises(UserError, match=f"in the cache: {cache}: .*HF_HOME") as error:
        gguf_folder(str(path), dtype=torch.float32)
    assert os.strerror(number) in str(error.value)
    assert "download" not in str(error.value)
    assert "\n" not in str(error.value)
    left = {folder.name[16:] for folder in (cache / "draftsmith/gguf").iterdir()}
    assert left == ({f"-v{gguf_files.FORMAT}"} if place == "write_safetensors" else set())


def test_a_disk_without_enough_room_is_seen_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _: usage)
    said = "No space left on device .0.00 GB are needed and 0.00 GB are free.: free"
    with pytest.raises(UserError, match=said):
        gguf_folder(str(path), dtype=torch.float32)


def test_a_cache_below_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file" / "hf"))
    with pytest.raises(UserError, match="file/hf/draftsmith.*Not a directory.*HF_HOME"):
        gguf_folder(str(path))


def test_a_limit_of_file_sizes_ends_in_one_line(tmp_path: Path, cache: Path) -> None:
    """A real refusal of the system."""
    path = str(write_gguf(tmp_path / "tiny.gguf"))
    gguf_folder(path)
    with (
        largest_file(1_000_000),
        pytest.raises(UserError, match=f"in the cache: {cache}.*File too large"),
    ):
        gguf_folder(path, dtype=torch.float32)
