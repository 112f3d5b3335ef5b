"""What scripts/quickstart.sh needs beside the pipeline: prompts of one narrow domain, and its last words.

    python scripts/lab/quickstart.py prompts outputs/quickstart/prompts
    python scripts/lab/quickstart.py seen outputs/quickstart/report/report.json

The first command writes train.jsonl and eval.jsonl: customers' orders, to be answered as one JSON object each, with the
same worked example before each. Sentences and values of the two files are different ones. The second says in words what
a report of one trained draft and the one it began with shows.
"""

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.files import write_atomically
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import format_estimate, format_number, format_speedup

if TYPE_CHECKING:
    from eval.results.report import EvalReport

FRAME = """\
Turn each order into one JSON object with the keys customer, city, items and express.
Order: Hello, this is Paul Wagner from Hamburg. Please send me two umbrellas and one table cloth, as fast as you can.
JSON: {"customer": "Paul Wagner", "city": "Hamburg", "items": [{"product": "umbrella", "quantity": 2}, \
{"product": "table cloth", "quantity": 1}], "express": true}
Order: ORDER
JSON:"""
COUNTS = {"train": 64, "eval": 24}
ORDERS = {
    "train": """\
NAME here, I live in CITY. I would like N1 P1s and N2 P2s. WHEN
Could you ship N1 P1s and N2 P2s to CITY? The name is NAME. WHEN
I need N1 P1s, also N2 P2s. Address: NAME, CITY. WHEN
Dear shop, please put N1 P1s together with N2 P2s on my account (NAME, CITY). WHEN
My name is NAME and I want to order N1 P1s plus N2 P2s for our house in CITY. WHEN
Order for CITY: N1 P1s, N2 P2s. Customer is NAME. WHEN""",
    "eval": """\
We moved to CITY last week and still lack N1 P1s and N2 P2s. Bill it to NAME. WHEN
On behalf of NAME I am buying N1 P1s, and on top of that N2 P2s; deliver to CITY. WHEN
This is a request by NAME: N1 P1s and N2 P2s, to be dropped off in CITY. WHEN""",
}
VALUES = {
    "train": {
        "NAME": "Anna Becker, Omar Haddad, Lucy Chen, Pablo Ruiz, Ingrid Olsen, Tariq Aziz, Maria Costa, Viktor Novak, "
        "Grace Mensah, Yuki Sato, Liam Doyle, Elena Petrova, Jonas Weber, Amara Diallo, Peter Hansen, Sofia Rossi",
        "CITY": "Berlin, Madrid, Oslo, Porto, Vienna, Dublin, Prague, Lyon, Boston, Kyoto, Accra, Zagreb",
        "PRODUCT": "garden chair, desk lamp, coffee mug, bath towel, wall clock, picture frame, wool blanket, kettle, "
        "water bottle, notebook, door mat, candle, tea pot, bread tin, flower vase, rain jacket, bicycle pump",
        "WHEN": "It is urgent., There is no hurry., Express please., Normal delivery is fine.",
    },
    "eval": {
        "NAME": "Mira Kowalski, Tom Fletcher, Aisha Bello, Hugo Lambert, Clara Jensen, Ravi Menon, Bridget Quinn",
        "CITY": "Krakow, Bristol, Valencia, Denver, Osaka, Tallinn",
        "PRODUCT": "frying pan, yoga mat, bird feeder, shower curtain, kitchen scale, reading light, pencil case",
        "WHEN": "Take your time., Send it as fast as you can.",
    },
}
NUMBERS = "two, three, four, five, six, seven, eight, nine, ten, twelve"


def orders(part: str) -> list[str]:
    """Different orders of a part, always the same ones."""
    rng = random.Random(part)
    values = {key: text.split(", ") for key, text in VALUES[part].items()}
    found: dict[str, None] = {}
    while len(found) < COUNTS[part]:
        order = rng.choice(ORDERS[part].splitlines())
        chosen = {key: rng.choice(values[key]) for key in ("NAME", "CITY", "WHEN")}
        chosen["P1"], chosen["P2"] = rng.sample(values["PRODUCT"], 2)
        chosen["N1"], chosen["N2"] = rng.sample(NUMBERS.split(", "), 2)
        for key, value in chosen.items():
            order = order.replace(key, value)
        found[order] = None
    return list(found)


def write_prompts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in COUNTS:
        rows = [{"prompt": FRAME.replace("ORDER", order)} for order in orders(part)]
        write_atomically(folder / f"{part}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def seen(report: "EvalReport") -> str:
    """What was measured of the trained draft and of the one it began with, and whether that is more than chance."""
    # The prompts do without.
    from eval.reporting.summary import fastest_method_line, lossless_verdict, void_line
    from eval.results.report import LEAST_PROMPTS

    found = next(c for c in report.comparisons if c.task == ALL_TASKS)
    low, high = found.difference.ci or (0.0, 0.0)
    if found.prompts < LEAST_PROMPTS:
        verdict = f"is of {found.prompts} prompts: no verdict on fewer than {LEAST_PROMPTS}"
    elif low > 0:
        verdict = "lies above 0: this training has raised acceptance in this domain"
    elif high < 0:
        verdict = "lies below 0: this training has lowered acceptance in this domain"
    else:
        verdict = "contains 0: no gain is shown, take this as a tour of the pipeline"
    before, after = (
        next(m for m in report.pooled if m.name == name and m.temperature == found.temperature)
        for name in (found.b, found.a)
    )
    row = "{:17} {:24} {:4} {}".format
    lines = [row(f"on {after.prompts} prompts", "α [95 %]", "τ", "speed-up [95 %]")]
    for m in (before, after):
        alpha, speedup = format_estimate(m.alpha, 3), format_speedup(m)
        lines.append(row(m.name, alpha, format_number(m.tau.value, 2), speedup))
    difference = format_estimate(found.difference, 3, signed=True)
    lines += [
        f"α of {found.a} minus {found.b} on {found.prompts} prompts, untimed, none trained on: {difference}",
        f"The interval {verdict}.",
        fastest_method_line(report),
        *filter(None, [void_line(report)]),
        lossless_verdict(report),
        "α: probability that a drafted token is accepted; τ: tokens a pass of the target; speed-up: of decoding.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prompts", path]:
            write_prompts(Path(path))
        case ["seen", path]:
            from eval.results.report import read_report

            print(seen(read_report(Path(path))))
        case words:
            print((__doc__ or "").strip())
            sys.exit(0 if words == ["--help"] else 2)
