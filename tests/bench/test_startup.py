"""Cold starts find an empty folder, warm ones what a cold start left."""

from pathlib import Path
from typing import Any, Self, cast

from bench.startup import measure_startup


class Started:
    """A worker that fills the folder it is given, as compiled kernels do."""

    def __init__(self, seen: list[bool]) -> None:
        self.seen = seen

    def ask(self, **request: Any) -> dict[str, Any]:
        if "folder" in request:
            folder = Path(request["folder"])
            self.seen.append(folder.exists())
            folder.mkdir(exist_ok=True)
        return {"seconds": 0.0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


def test_cold_is_without_and_warm_with_compiled_kernels(tmp_path: Path) -> None:
    seen: list[bool] = []
    start = cast("Any", lambda: Started(seen))
    figures = measure_startup(
        "s/f32", start, start, peer_name="mlx-lm", load={"op": "load"}, name="w", scratch=tmp_path, repeats=2
    )
    assert seen == [False, False, True, True]
    assert [(f.name, f.peer, f.unit, f.ratio.count) for f in figures] == [
        ("startup/s/f32/cold", "mlx-lm", "s", 2),
        ("startup/s/f32/warm", "mlx-lm", "s", 2),
    ]
