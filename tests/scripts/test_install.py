"""An install without a checkout: it has every file, and its commands run from another folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decode.common import files
from decode.common.settings import parse_settings
from decode.model.names import recorded_name
from tests import drafts
from tests.worlds import ENV, ROOT
from train.trainer.settings import DistillConfig

PACKAGES = ("decode", "eval", "train", "scripts")
KINDS = (".py", ".cpp", ".j2", ".sh")


def below(folder: Path, *names: str) -> set[str]:
    """The files below these folders of `folder`."""
    found = (path for name in names for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found if path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `pip install .` has put this checkout."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"
    for name in (*PACKAGES, *files.BUNDLED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    words = ["--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words], check=True)
    shutil.rmtree(source)
    return folder / "site"


def run(site: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`draftsmith` of the install, in a folder beside it."""
    return python(site, site / "bin" / "draftsmith", *words)


def python(site: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Python with the install, in a folder beside it."""
    here = site.parent / "elsewhere"
    here.mkdir(exist_ok=True)
    command = [sys.executable, *map(str, words)]
    env = {**os.environ, **ENV, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_wheel_has_every_file(site: Path) -> None:
    """Catches a template or a source that is declared nowhere, and a folder that belongs to nobody in site-packages."""
    top = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {*PACKAGES, "bin"}
    here = below(ROOT, *PACKAGES)
    assert {Path(file).suffix for file in here} <= set(KINDS)
    assert {x for x in below(site, *PACKAGES) if not x.startswith("decode/bundled/")} == here
    assert below(site / "decode" / "bundled", *files.BUNDLED) == below(ROOT, *files.BUNDLED)


@pytest.mark.slow
def test_an_install_works_from_another_folder(site: Path) -> None:
    """Catches lists that are empty, a report without its template, the slow path for want of a source, a card without
    its template: five commands of an install, none of which finds a checkout."""
    here = site.parent / "elsewhere"
    tasks = run(site, "ls", "tasks").stdout.split()
    assert tasks == sorted(file.stem for file in (ROOT / "assets" / "tasks").glob("*.yaml"))
    recipes = run(site, "ls", "recipes").stdout.split()
    assert recipes == sorted(
        str(x.relative_to(ROOT)) for x in (ROOT / "configs/distill").glob("*.yaml")
    )
    run(
        site, "eval", "--target", "assets/target", "--methods", "ngram", "--tasks", "[{name: prose, limit: 1}]",
        "--temperatures", "[0.0]", "--max_new_tokens", 4, "--phase_prompts", 0, "--out", "report",
    )  # fmt: skip
    assert (here / "report" / "report.html").is_file()
    report = json.loads((here / "report" / "report.json").read_text())
    assert (report["target"]["name"], report["git"]) == ("assets/target", None)
    done = run(site, "generate", "--dtype", "w8a8", "--max_new_tokens", 4, "--prompt", "x")
    fast = torch.cpu._is_vnni_supported() and shutil.which(os.environ.get("CXX", "c++"))
    assert "need AVX512-VNNI" not in done.stderr or not fast
    draft = drafts.draft(site.parent / "draft")
    run(site, "publish", "--draft", draft, "--repo", "me/x", "--out", "published")
    assert (here / "published" / "README.md").is_file()


@pytest.mark.slow
def test_the_readme_s_snippet_runs_from_an_install(site: Path) -> None:
    """Catches a snippet that needs a checkout, prints another figure than the README says, or no colour."""
    readme = (ROOT / "README.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    shown = python(site, "-c", f"import os\nos.environ['FORCE_COLOR'] = '1'\n{snippet}").stdout
    text = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert text.startswith('def add(a, b):\n    """Add a list')
    assert "\x1b[32m" in shown
    (figures,) = re.findall(r"and `(\d+ rounds, τ [\d.]+)`\.$", readme, re.MULTILINE)
    assert f"{figures}, " in text.splitlines()[-1]


def test_files_of_the_project_are_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a default that exists in a checkout alone, a folder of the user's that is passed over, an output that is
    written into the project."""
    monkeypatch.chdir(tmp_path)
    words = ["--config", "configs/bundled/causal.yaml", "--draft.init", "assets/draft"]
    found = parse_settings(DistillConfig, "", [*words, "--out", "assets/target"])
    assert found.target == str(ROOT / "assets" / "target")
    assert vars(found.draft)["init"] == str(ROOT / "assets" / "draft")
    assert found.out == "assets/target"
    assert recorded_name(found.target) == ("assets/target", None)
    (tmp_path / "assets" / "target").mkdir(parents=True)
    assert parse_settings(DistillConfig, "", words).target == "assets/target"
    names = ("assets", "assets/none", "configs/../x", "other/target", "")
    assert [files.find_bundled(name) for name in names] == list(names)
