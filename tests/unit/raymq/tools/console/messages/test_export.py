"""Tests of exporting a console's tables as files, including cells with malicious content."""

from __future__ import annotations

import csv
import io
import json

from raymq.tools.console.messages.export import csv_text, json_lines


def test_csv_reads_back_and_keeps_numbers() -> None:
    text = csv_text(["a", "b"], [['x,"y"\nz', -5], [None, 2**60]])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b"], ['x,"y"\nz', "-5"], ["", str(2**60)]]


def test_a_cell_that_a_spreadsheet_would_calculate_is_text() -> None:
    hostile = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"]
    rows = list(csv.reader(io.StringIO(csv_text(["cell"], [[text] for text in hostile]), newline="")))[1:]
    assert rows == [[f"'{text}"] for text in hostile]


def test_json_has_a_row_per_line_and_exact_numbers() -> None:
    lines = json_lines([{"offset": 2**60, "tags": ["é\n"], "count": 3, "ok": True}, {}]).split("\n")
    assert json.loads(lines[0]) == {"offset": str(2**60), "tags": ["é\n"], "count": 3, "ok": True}
    assert lines[1:] == ["{}", ""]
