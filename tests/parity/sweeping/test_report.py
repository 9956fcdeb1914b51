from parity.sweeping.findings import Finding, sort_findings
from parity.sweeping.outcome import Outcome
from parity.sweeping.report import flips, to_json, to_markdown
from parity.sweeping.row import Row

EQUAL = Outcome(verdict="equal")
LOGIC = Outcome(verdict="different", where="row 1, step 0", size=2.0, max_ulp=9)
RAISES = Outcome(verdict="different", where="raised", detail="ValueError: shapes")
REFUSED = Outcome(verdict="refused", detail="no merge")


def row(subject: str, model: str, invariance: str, outcome: Outcome) -> Row:
    return Row(subject=subject, model=model, dtype="f32", kv="fp", invariance=invariance, outcome=outcome)


ROWS = (
    row("mlx-lm 0.9.0", "llama", "in-pieces", RAISES),
    row("mlx-lm 0.9.0", "llama", "one-by-one", LOGIC),
    row("mlx-lm 0.10.0", "llama", "in-pieces", EQUAL),
    row("mlx-lm 0.10.0", "llama", "one-by-one", LOGIC),
    row("mlx-lm 0.10.0", "gemma", "in-pieces", REFUSED),
)


def test_json_counts_every_row_by_verdict() -> None:
    answer = to_json(ROWS, sort_findings(ROWS, []))

    assert (answer["equal"], answer["different"], answer["refused"]) == (1, 3, 1)
    assert len(answer["rows"]) == 5
    assert answer["rows"][0]["subject"] == "mlx-lm 0.9.0"
    assert answer["new"][0] == "mlx-lm 0.9.0: llama/f32/fp/in-pieces"


def test_flips_are_what_only_the_older_version_gets_wrong() -> None:
    assert flips(ROWS) == [
        "mlx-lm 0.9.0 against mlx-lm 0.10.0:",
        "",
        "- ValueError: shapes: llama/f32/fp/in-pieces",
    ]


def test_markdown_shows_a_sign_a_cell_and_lists_known_and_new_differences() -> None:
    known = Finding(subject="mlx-lm 0.9.0", rows=("*/in-pieces",), what="It raises.", right="The same logits.")
    page = to_markdown(ROWS, sort_findings(ROWS, [known]), command="assay sweep")

    assert "| llama | X | ! |" in page
    assert "| gemma |  | - |" in page
    assert "- It raises. Right: The same logits.\n  - `llama/f32/fp/in-pieces`: ValueError: shapes" in page
    assert "- mlx-lm 0.10.0: `llama/f32/fp/one-by-one`: first at row 1, step 0, 2 standard deviations" in page
    assert "## What a newer version mended" in page


def test_a_row_survives_json_under_another_subject() -> None:
    again = Row.from_json(ROWS[0].to_json(), subject="engine")

    assert again == row("engine", "llama", "in-pieces", RAISES)
