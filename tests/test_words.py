"""Pages and docstrings are English sentences: no telegram of the list below, no sentence without a verb."""

import ast
import re
import subprocess

import pytest

from graph_worth.folders import ROOT

# Sentences that readers had to read twice.
TELEGRAMS = (
    "Of one GPU on a quiet host",
    "with issue below busy",
    "both ratios stand",
    "What there is to say after",
    "but by chance",
    "have no other ones",
    "is one as well",
    "of how many runs",
    "not sound:",
    "proven after all",
    "what your host makes the GPU wait",
    "in the mean, whatever",
    "is the most that a graph gains",
    "the most that torch reserved",
    "What a replay wrote",
    "measured before, no intervals",
    "What came of it",
    "what came of them",
    "alone it does",
    "the slowest at each step",
    "No GPU has run this",
    "on no GPU yet",
)
# Words that a colleague would not begin a docstring with.
BEGINNINGS = re.compile(r"(What|Whether|Which|Where|Of)\b")
# A sentence that begins with Of has a verb; with What or Whether it has another one behind its clause.
SENTENCE = re.compile(r"(?:^|(?<=[.!?:] ))((Of|Whether|What) [^.!?]*[.!?])")
VERB = re.compile(
    r"\b(is|are|was|were|be|has|have|had|can|cannot|could|may|might|must|will|would|should|does|do|did|decides?|depends?"
    r"|makes?|made|takes?|took|gains?|gained|costs?|holds?|held|needs?|counts?|reads?|writes?|wrote|runs?|ran|gives?|gave"
    r"|says?|stays?|stands?|remains?|fails?|failed|passed|passes|shows?|returns?|raises?|differs?|changed?|changes"
    r"|captured?|captures|waits?|issued?|issues|came|comes?|goes|went|sees?|agreed?|agrees|leaves?)\b"
)
# Records of earlier days, and tables and pages that are made of runs.
LEFT_OUT = ("CHANGELOG.md", "docs/log.md", "results/", "tests/")


def files(pattern):
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", pattern], capture_output=True, text=True, check=True)
    return [ROOT / name for name in names.stdout.split() if not name.startswith(LEFT_OUT)]


def prose(page):
    """The text of a page in one line, without code, tables, addresses, headings and bold words before a sentence."""
    text = re.sub(r"```.*?```|<!--.*?-->|\*\*[^*]*[.?:]\*\*", "", page, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"    |#|\|", line)]
    text = re.sub(r"\]\([^)]*\)|[*_\[`]", "", "\n".join(lines))
    return re.sub(r"\s+", " ", re.sub(r"\n\s*\n|\n\s*(-|\d\.) ", ". ", text))


def without_a_verb(text):
    """Sentences that begin with Of, Whether or What and have no main verb; questions are free."""
    least = {"Of": 1, "Whether": 2, "What": 2}
    sentences = [match for match in SENTENCE.findall(text) if not match[0].endswith("?")]
    return [sentence for sentence, word in sentences if len(VERB.findall(sentence)) < least[word]]


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text, name = ast.get_docstring(node), getattr(node, "name", "module")
            if text and not name.startswith("_"):
                yield f"{path.relative_to(ROOT)}: {name}", text


@pytest.mark.parametrize("page", files("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_telegram(page):
    text = page.read_text()
    one_line = re.sub(r"\s+", " ", text)
    assert [words for words in TELEGRAMS if words in one_line] == []
    assert without_a_verb(prose(text)) == []


def test_public_docstrings_begin_with_a_noun_or_a_verb_and_have_no_telegram():
    found = [pair for path in files("*.py") for pair in docstrings(path)]
    assert len(found) > 1000
    assert [name for name, text in found if BEGINNINGS.match(text)] == []
    assert [name for name, text in found if any(words in re.sub(r"\s+", " ", text) for words in TELEGRAMS)] == []


def test_a_sentence_without_a_verb_is_seen_and_ordinary_uses_are_free():
    telegrams = ["Of ranks the slowest at each step.", "What the host holds of the objects.", "Whether a graph gains."]
    plain = ["Of 41 runs, 36 are near 1.", "What a graph holds is fixed.", "Whether it gains depends on the host."]
    assert without_a_verb(" ".join(telegrams)) == telegrams
    assert without_a_verb(" ".join([*plain, "What is captured?", "It says what it does."])) == []
