"""From "it differs" to the cause: the step, the module, the operation, the position, and what float64 says about both sides.

`explain` runs a case on two runners and compares what they leave behind; nothing here knows which oracle or engine they are.
`cause.py` weighs the evidence, `position.py` finds the position by shorter prompts, `report.py` says it in words.
"""

from parity.explaining.cause import Cause
from parity.explaining.explain import Explanation, explain

__all__ = ["Cause", "Explanation", "explain"]
