"""What scripts/quickstart.sh needs beside the pipeline: prompts of one narrow domain, and its last words.

    python scripts/lab/quickstart.py prompts outputs/quickstart/prompts
    python scripts/lab/quickstart.py seen outputs/quickstart/report/report.json

The first command writes train.jsonl, choice.jsonl and eval.jsonl: one question about different foods, whose answers are
in no prompt. The second says in words what a report of one trained draft and the one it began with shows.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.files import write_atomically
from eval.metrics.acceptance import over_best_arm
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import format_estimate, format_number, format_speedup

if TYPE_CHECKING:
    from eval.results.report import EvalReport

QUESTION = "What are the health benefits of eating FOOD? Answer in two sentences."
FOODS = {
    "train": """\
apples, apricots, avocados, blackberries, blackcurrants, boysenberries, cantaloupes, cherries, clementines,
coconuts, currants, dates, dragon fruit, elderberries, figs, grapefruit, grapes, guavas, honeydew melons,
jackfruit, kiwis, kumquats, lemons, limes, loganberries, mandarins, mangoes, mulberries, nectarines, olives,
papayas, passion fruit, peaches, pears, persimmons, plantains, plums, pomegranates, pomelos, prunes,
quinces, raisins, raspberries, rhubarb, star fruit, watermelons, artichokes, asparagus, aubergines, bamboo
shoots, beetroot, bell peppers, bok choy, broccoli, Brussels sprouts, cabbage, carrots, cassava,
cauliflower, celeriac, celery, chard, chicory, chilli peppers, Chinese cabbage, courgettes, cress, dandelion
greens, endive, fennel, green beans, horseradish, iceberg lettuce, kale, kohlrabi, mushrooms, mustard
greens, okra, onions, pak choi, parsnips, peas, potatoes, pumpkins, purslane, radishes, rocket, romaine
lettuce, rutabaga, salsify, scallions, seaweed, shallots, snow peas, sorrel, spring onions, squash, sugar
snap peas, swede, sweetcorn, sweet potatoes, taro, tomatoes, turnips, water chestnuts, yams, almonds, Brazil
nuts, cashews, chestnuts, macadamia nuts, peanuts, pecans, pine nuts, pistachios, flax seeds, hemp seeds,
poppy seeds, pumpkin seeds, sesame seeds, sunflower seeds, amaranth, barley, brown rice, buckwheat,
couscous, farro, millet, muesli, oat bran, polenta, rye bread, sorghum, spelt, teff, wholemeal bread,
wholewheat pasta, wild rice, adzuki beans, black beans, black-eyed peas, broad beans, butter beans,
chickpeas, edamame, haricot beans, hummus, kidney beans, lentils, lima beans, mung beans, navy beans, pinto
beans, soybeans, split peas, tofu, white beans, anchovies, carp, clams, cod, crab, haddock, halibut,
herring, lobster, mackerel, monkfish, mussels, octopus, perch, pollock, prawns, salmon, sardines, sea bass,
shrimp, snapper, sole, squid, swordfish, tilapia, trout, tuna, turbot, chicken, duck, eggs, lamb, liver,
rabbit, turkey, veal, venison, buttermilk, cottage cheese, cream cheese, feta, goat cheese, Greek yogurt,
kefir, milk, mozzarella, parmesan, ricotta, black pepper, cardamom, chives, cinnamon, cloves, cumin, dill,
ginger, lemongrass, mint, nutmeg, oregano, paprika, parsley, rosemary, saffron, sage, tarragon, thyme,
turmeric, almond butter, almond milk, coconut oil, dark chocolate, honey, maple syrup, miso, oat milk, olive
oil, peanut butter, rice cakes, soy milk, vegetable soup, apple juice, orange juice""",
    "choice": """\
blueberries, lychees, tangerines, collard greens, radicchio, watercress, bulgur, fava beans, kippers, beef,
basil, vanilla, gooseberries, pineapples, butternut squash, leeks""",
    "eval": """\
bananas, garlic, cucumbers, quinoa, strawberries, cheddar, cranberries, oranges, hazelnuts, oatmeal,
oysters, pork, bean sprouts, walnuts, sauerkraut, lupins, coriander, kimchi, spinach, chia seeds, wheat germ,
tempeh, scallops, crispbread""",
}
"""What is trained on; what settings were chosen by; what is evaluated, the first ones against the clock."""


def foods(part: str) -> list[str]:
    return " ".join(FOODS[part].split()).split(", ")


def write_prompts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in FOODS:
        asked = [QUESTION.replace("FOOD", food) for food in foods(part)]
        lines = [json.dumps({"prompt": text}) + "\n" for text in asked]
        write_atomically(folder / f"{part}.jsonl", "".join(lines))


def over_lookup(outputs: Path, trained: str) -> str:
    """How much faster the trained draft decoded than the n-gram, paired over the prompts whose seconds count."""
    arms: dict[str, dict[tuple[str, str], tuple[float, int]]] = {}
    for x in map(json.loads, outputs.read_text("utf-8").splitlines()):
        if not x["untimed"]:
            key = x["task"], x["id"]
            arms.setdefault(x["method"], {})[key] = x["seconds"], len(x["output_ids"])
    _, prompts, speedup = over_best_arm(arms[trained], {"ngram": arms["ngram"]}, 0)
    return f"{trained} over the n-gram: {format_estimate(speedup, 2, '×')} (n = {prompts})."


def seen(report: "EvalReport", over: str = "") -> str:
    """What was measured of the trained draft, of the one it began with and of the n-gram, and what a verdict lacks."""
    # The prompts do without.
    from eval.reporting.decision import lacking
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
    rows = [m for m in report.pooled if m.is_real_draft and m.temperature == found.temperature]
    after = next(m for m in rows if m.name == found.a)
    row = "{:17} {:24} {:4} {}".format
    lines = [row(f"on {after.prompts} prompts", "α [95 %]", "τ", "speed-up [95 %]")]
    for m in rows:
        alpha, speedup = format_estimate(m.alpha, 3), format_speedup(m)
        lines.append(row(m.name, alpha, format_number(m.tau.value, 2), speedup))
    difference = format_estimate(found.difference, 3, signed=True)
    voided, missing = void_line(report), lacking(after)
    lines += [
        f"α of {found.a} minus {found.b} on {found.prompts} prompts, untimed, none trained on: {difference}",
        f"The interval {verdict}.",
        fastest_method_line(report),
        *([over] if over and not voided else []),
        *([f"To switch {after.name} on this lacks {', '.join(missing)}."] if missing else []),
        *filter(None, [voided]),
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

            read = read_report(Path(path))
            outputs, names = Path(path).with_name("outputs.jsonl"), {m.name for m in read.methods}
            timed = outputs.is_file() and "ngram" in names
            over = over_lookup(outputs, read.comparisons[0].a) if timed else ""
            print(seen(read, over))
        case words:
            print((__doc__ or "").strip())
            sys.exit(0 if words == ["--help"] else 2)
