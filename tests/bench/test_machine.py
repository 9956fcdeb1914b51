"""A machine's identity is stable and names nobody."""

import json
import platform

from bench.machine import machine


def test_identity_does_not_depend_on_the_load() -> None:
    assert machine()["identity"] == machine()["identity"]


def test_nothing_names_the_host() -> None:
    assert platform.node() not in json.dumps(machine())
