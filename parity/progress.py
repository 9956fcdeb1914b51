"""Progress of long work: how far, how fast, how long still, and a tally of what came out so far.

Guarantees: on a terminal one live line that leaves nothing behind; elsewhere plain lines, one for every tenth of the work
and one for everything notable, with rate and remaining time once the work has gone on for a while. Words carry the meaning;
colour only repeats it, and there is none under NO_COLOR. Names are never read as markup. It counts; it decides nothing.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

SETTLED: Final = 10.0  # seconds after which a rate means something


class LongWork(AbstractContextManager["LongWork"]):
    """Work of `total` pieces, told about as its pieces are done.

    Args:
        verb: What is being done, such as `check`.
        unit: What a piece is called, in the plural: `cases`.
        total: Pieces in all.
        console: Where to tell; standard error, so that standard output holds the result alone.
        clock: Seconds from any start.
    """

    def __init__(
        self, verb: str, *, unit: str, total: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self.done = 0
        self.tally: dict[str, int] = {}
        self._unit = unit
        self._console = console
        self._clock = clock
        self._start = clock()
        self._bar = Progress(
            TextColumn(verb, markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Rate(unit),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[tally]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(verb, total=total, tally="")

    def __enter__(self) -> Self:
        """Start the clock, and the live line where there is one."""
        self._start = self._clock()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the live line."""
        self._bar.stop()

    def tell(self, word: str, name: str, *, notable: bool = False) -> None:
        """One more piece is done.

        Args:
            word: What came of it, counted in the tally: `IDENTICAL`.
            name: What it was.
            notable: Elsewhere than on a terminal it gets a line of its own.
        """
        self.done += 1
        self.tally[word] = self.tally.get(word, 0) + 1
        self._bar.update(self._task, completed=self.done, tally=f"{self.told()}  {name}")
        if self._console.is_terminal:
            return
        if notable or self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
            self._line(f"{self.done} of {self.total}  {word}  {name}{self._pace()}")

    def doing(self, what: str) -> None:
        """What is being done now; on a terminal it stands in the live line, elsewhere it is a line."""
        self._bar.update(self._task, tally="  ".join(part for part in (self.told(), what) if part), refresh=True)
        if not self._console.is_terminal:
            self._line(what)

    def told(self) -> str:
        """The tally: `118 IDENTICAL, 2 DIFFERENT`."""
        return ", ".join(f"{count} {word}" for word, count in self.tally.items())

    def _pace(self) -> str:
        seconds = self._clock() - self._start
        if seconds < SETTLED or self.done == self.total:
            return ""
        rate = self.done / seconds
        return f"  ({rate:.3g} {self._unit}/s, {remaining((self.total - self.done) / rate)} left)"

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True, highlight=False)


class _Rate(ProgressColumn):
    """Pieces a second, over the last of them."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        super().__init__()

    def render(self, task: Task) -> Text:
        """`3.4 cases/s`; empty before the first piece."""
        return Text(f"{task.speed:.3g} {self.unit}/s" if task.speed else "", style="progress.data.speed")


def remaining(seconds: float) -> str:
    """`40 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
