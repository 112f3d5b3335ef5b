"""The list of mutations cannot rot: each still changes one place of the code, and names tests that exist."""

from collections import Counter

from tests.mutations import ROOT, read_mutations


def test_every_mutation_still_fits() -> None:
    """Bug: code or a test moves, and the mutation changes nothing, or no test is asked about it."""
    wrong = []
    texts: dict[str, str] = {}

    def text_of(file: str) -> str:
        if file not in texts:
            path = ROOT / file
            texts[file] = path.read_text() if path.is_file() else ""
        return texts[file]

    mutations = read_mutations()
    for number, one in enumerate(mutations, 1):
        if text_of(one.file).count(one.old) != 1:
            wrong.append(f"{number}: {one.old!r} does not stand once in {one.file}")
        for test in one.tests:
            file, _, name = test.partition("::")
            if f"def {name}(" not in text_of(file) and (name or not text_of(file)):
                wrong.append(f"{number}: there is no {test}")
        if not one.tests or one.old == one.new:
            wrong.append(f"{number}: it changes nothing, or names no test")
    assert wrong == []
    assert Counter(map(repr, mutations)).most_common(1)[0][1] == 1
