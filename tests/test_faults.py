"""What tests/faults.md says of bad input, signals and kills is what happens (faults.py makes that
page)."""

import faults


def test_every_input_gives_what_the_page_says(tmp_path):
    """One line and nothing else, or a run that ends; no traceback."""
    rows = faults.try_inputs(tmp_path)
    page = faults.PAGE.read_text()
    assert len(rows) >= 200
    assert not [row for row in rows if not row[-1]]
    assert not [row for row in rows if f"| {row[1]} | {row[2]} |" not in page]


def test_signals_and_kills_lose_nothing(tmp_path):
    """One method, a signal that is handled and one that is not, at each place; the page has all."""
    rows = faults.try_kills(tmp_path, ["superfed"], ["SIGTERM", "kill -9"])
    assert len(rows) == 8 and not [row for row in rows if not row[-1]]
    page = faults.PAGE.read_text()
    assert all(f"| {', '.join(faults.KINDS)} | {name} | {point} |" in page
               for name in faults.SIGNALS for point in faults.POINTS)
    assert "ANOTHER" not in page and "LOST" not in page
