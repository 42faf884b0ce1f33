"""Pictures as SVG text: boxes, words, arrows. Equal calls write equal files, which tests compare."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#e15759", "#9c755f", "#edc948")
"""Of ranks, by number."""
INK, GREY, LIGHT = "#222222", "#777777", "#eeeeee"


def colour(number: int) -> str:
    """Return the colour of a rank."""
    return COLOURS[number % len(COLOURS)]


class Drawing:
    """A picture that grows to the right and down as things are drawn."""

    def __init__(self, alt: str) -> None:
        self.alt = alt
        self.width = self.height = 0.0
        self._behind: list[str] = []
        self._parts: list[str] = []
        self._heads: dict[str, str] = {}

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        lines: Sequence[str] = (),
        **how: object,
    ) -> None:
        """Draw a rectangle with lines of text in its middle; how: attributes of the rectangle."""
        self._reach(x + width, y + height)
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{_written(how)}/>'
        )
        ink = "white" if fill in COLOURS and fill != "#edc948" else INK
        for number, line in enumerate(lines):
            middle = y + height / 2 + 14 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle + 4, line, fill=ink, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        fill: str = INK,
        anchor: str = "start",
        size: int = 12,
        bold: bool = False,
    ) -> None:
        """Write a line."""
        taken = 0.58 * size * len(words) * {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self._reach(x + taken, y + 4)
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        fill: str,
        *,
        dashed: bool = False,
        thick: bool = False,
    ) -> None:
        """Draw an arrow behind all boxes."""
        head = self._heads.setdefault(fill, f"head{len(self._heads)}")
        how = ' stroke-dasharray="5 3"' if dashed else ""
        self._behind.append(
            f'<path d="M {start[0]:g} {start[1]:g} L {end[0]:g} {end[1]:g}" stroke="{fill}" fill="none" '
            f'stroke-width="{3.2 if thick else 1.6}"{how} marker-end="url(#{head})"/>'
        )

    def __str__(self) -> str:
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{fill}"/></marker>'
            for fill, name in self._heads.items()
        )
        width, height = self.width + 12, self.height + 12
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                f'width="{width:g}" height="{height:g}" role="img" '
                'font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.alt)}</title>",
                f"<defs>{heads}</defs>",
                '<rect width="100%" height="100%" fill="white"/>',
                *self._behind,
                *self._parts,
                "</svg>\n",
            ]
        )

    def behind(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Draw a rectangle behind all that was drawn and will be."""
        self._reach(x + width, y + height)
        self._behind.insert(
            0, f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" rx="6"/>'
        )

    def _reach(self, right: float, bottom: float) -> None:
        self.width, self.height = max(self.width, right), max(self.height, bottom)


def _written(how: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in how.items())
