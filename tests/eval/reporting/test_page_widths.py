"""The report's page in a browser: at 1280 and at 400 pixels nothing is cut off or runs out of the window.

The browser is $CHROMIUM, else `chromium`; without that variable these tests are skipped where there is none.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from eval import report

RESULTS = Path(__file__).parents[3] / "docs" / "results"
MEASURE = """<script>
const right = e => e.getBoundingClientRect().right;
const plots = [...document.querySelectorAll("svg")].map(e => Math.round(e.getBoundingClientRect().left));
parent.postMessage(JSON.stringify({
  window: innerWidth,
  page: document.documentElement.scrollWidth,
  outside: [...document.body.querySelectorAll("*")].filter(e => right(e) > innerWidth + 1).length,
  columns: new Set(plots).size,
}), "*");
</script>"""

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BROWSER, reason="needs Chromium: apt-get install chromium, or set CHROMIUM"
    ),
]


def layout(page: str, width: int, folder: Path) -> dict[str, int]:
    """What a browser makes of a page: width of window and page, elements outside of it, columns of plots."""
    (folder / "page.html").write_text(page.replace("</body>", f"{MEASURE}</body>"), "utf-8")
    # A window of Chromium is 500 pixels wide at least; a frame has any width.
    frame = f'<iframe src="page.html" style="border: 0; width: {width}px; height: 2000px"></iframe>'
    listen = "<script>onmessage = said => { document.title = said.data; }</script>"
    (folder / "frame.html").write_text(f"<title></title>{listen}{frame}", "utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    wait = ["--virtual-time-budget=10000", "--window-size=1400,2000"]
    command = [BROWSER, *words, *wait, (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:200]
    found: dict[str, int] = json.loads(title[1])
    assert found["window"] == width
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    shutil.copy(RESULTS / "smollm2.json", folder / "report.json")
    report.main(report.ReportConfig(folder=str(folder)))
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "columns"), [(1280, 2), (400, 1)])
def test_the_page_fits_the_window(page: str, width: int, columns: int, tmp_path: Path) -> None:
    found = layout(page, width, tmp_path)
    assert (found["page"], found["outside"], found["columns"]) == (width, 0, columns)


def test_a_table_that_is_cut_off_is_seen(page: str, tmp_path: Path) -> None:
    """A planted bug: one cell that cannot wrap."""
    wide = page.replace('<td data-name="method">', '<td style="display: block; width: 1400px">', 1)
    assert wide != page
    assert layout(wide, 1280, tmp_path)["outside"] > 0
