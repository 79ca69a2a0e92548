"""What a GPU gives against what a user gets, as an SVG: one line a layout, one point a load. Same figures, same bytes.

    x   output tokens a second and user, 1 / ITL p50
    y   output tokens a second and GPU, of all users

To the right and above is better. Filled points are those of runs that served their users: neither axis shows who waited
long for a first token. The dashed line joins the filled points that no other one beats in both ways; their loads stand
beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 860, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 640, 40, 500
_COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6d31", "#7f7f7f", "#b2182b")
"""The first eight but one: Okabe and Ito's, told apart by people who do not see all colours."""
_TICKS = 6


class Point(NamedTuple):
    """One run. `load` is how its point is called."""

    tokens_s_user: float
    tokens_s_gpu: float
    load: str
    is_served: bool
    """Whether it is to count: who plots says what that takes."""


class _Scale(NamedTuple):
    """Values to pixels: 0 lies at `low`, `top` at `high`."""

    low: int
    high: int
    step: float
    top: float

    def at(self, value: float) -> str:
        return f"{self.low + (self.high - self.low) * value / self.top:.1f}"

    @property
    def ticks(self) -> list[float]:
        return [self.step * number for number in range(round(self.top / self.step) + 1)]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points, from left to right, than which no other is as good in one way and better in the other."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.tokens_s_user, -each.tokens_s_gpu)):
        if not best or point.tokens_s_gpu > best[-1].tokens_s_gpu:
            best.append(point)
    return best[::-1]


def pareto_svg(lines: Mapping[str, Sequence[Point]], title: str) -> str:
    """Return the plot of layouts by name, whose points are in the order of load; there is a point."""
    points = [each for line in lines.values() for each in line]
    x = _scale(_LEFT, _RIGHT, max(each.tokens_s_user for each in points))
    y = _scale(_BOTTOM, _TOP, max(each.tokens_s_gpu for each in points))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    best = frontier([each for each in points if each.is_served])
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 22, title, size=14),
        *_axes(x, y),
        _path(best, x, y, 'stroke="#999999" stroke-width="6" stroke-opacity="0.35" stroke-dasharray="10 6"'),
    ]
    for number, (name, line) in enumerate(lines.items()):
        drawn += _line(name, line, number, x, y)
    drawn += [_load(each, x, y) for each in best]
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _scale(low: int, high: int, value_max: float) -> _Scale:
    rough = (value_max or 1.0) / _TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    return _Scale(low, high, step, step * ceil((value_max or 1.0) / step))


def _axes(x: _Scale, y: _Scale) -> Iterator[str]:
    for tick in x.ticks:
        yield f'<path d="M{x.at(tick)} {_TOP}V{_BOTTOM}" stroke="#e5e5e5"/>'
        yield _text(x.at(tick), _BOTTOM + 18, f"{tick:g}", anchor="middle")
    for tick in y.ticks:
        yield f'<path d="M{_LEFT} {y.at(tick)}H{_RIGHT}" stroke="#e5e5e5"/>'
        yield _text(_LEFT - 8, float(y.at(tick)) + 4, f"{tick:g}", anchor="end")
    yield f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="#000000"/>'
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "output tokens/s of a user (1 / ITL p50)", anchor="middle")
    middle = (_TOP + _BOTTOM) / 2
    turned = f'transform="rotate(-90 20 {middle:g})" '
    yield _text(20, middle, "output tokens/s of a GPU", anchor="middle", more=turned)


def _line(name: str, line: Sequence[Point], number: int, x: _Scale, y: _Scale) -> Iterator[str]:
    color = _COLORS[number % len(_COLORS)]
    is_again = number >= len(_COLORS)
    dashes = ' stroke-dasharray="4 3"' if is_again else ""
    yield _path(line, x, y, f'stroke="{color}" stroke-width="1.8"{dashes}')
    for each in line:
        where = f'cx="{x.at(each.tokens_s_user)}" cy="{y.at(each.tokens_s_gpu)}" r="4"'
        yield f'<circle {where} fill="{color if each.is_served else "#ffffff"}" stroke="{color}"/>'
    top = _TOP + 10 + 20 * number
    yield f'<path d="M{_RIGHT + 16} {top}h22" stroke="{color}" stroke-width="3"{dashes}/>'
    yield _text(_RIGHT + 44, top + 4, name)


def _load(point: Point, x: _Scale, y: _Scale) -> str:
    left, top = float(x.at(point.tokens_s_user)) + 7, float(y.at(point.tokens_s_gpu)) - 7
    return _text(f"{left:.1f}", f"{top:.1f}", point.load, size=10)


def _path(line: Sequence[Point], x: _Scale, y: _Scale, style: str) -> str:
    places = " ".join(f"{x.at(each.tokens_s_user)},{y.at(each.tokens_s_gpu)}" for each in line)
    return f'<polyline points="{places}" fill="none" {style}/>'


def _text(
    left: float | str, top: float | str, text: str, *, size: int = 12, anchor: str = "start", more: str = ""
) -> str:
    return f'<text x="{left}" y="{top}" font-size="{size}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
