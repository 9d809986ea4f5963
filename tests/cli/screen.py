"""A small terminal, for what commands redraw."""

import re

CONTROL = re.compile(
    r"\x1b\[\??(?P<count>\d*)(?P<code>[A-Za-z])|(?P<move>[\r\n])|(?P<text>[^\x1b\r\n]+)"
)


def screen(output):
    """What stays on a terminal: lines, with cursor movements and erasures carried out."""
    lines, row, column = [""], 0, 0
    for match in CONTROL.finditer(output):
        if match["code"] == "A":
            row -= int(match["count"] or 1)
        elif match["code"] == "K":
            lines[row] = ""
        elif match["move"]:
            column = 0
            row += match["move"] == "\n"
            lines += [""] * (row + 1 - len(lines))
        elif match["text"]:
            lines[row] = (
                lines[row][:column].ljust(column)
                + match["text"]
                + lines[row][column + len(match["text"]) :]
            )
            column += len(match["text"])
    return lines
