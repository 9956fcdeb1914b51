"""Where two traces part first: the step, the module in execution order, the operation, the element and its head.

Guarantees: only bits decide, by the judge's own comparison; the order is that in which the expected side's modules finished,
children before what contains them. It reads two traces and runs nothing. Traces record the last position of a forward, so an
earlier position of the prompt is seen only through attention; `parity.explaining` runs shorter prompts to find it. Traces
without activations give the step alone, and `logits` for the module.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from parity.compare import Match, TensorDiff
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

LOGITS: Final = "logits"
SHOWN: Final = 3  # modules that finished just before
Side = Literal["expected", "actual"]

BY_HEADS: Final = re.compile(r"(^|\.)([qkv]_proj|[qkv]_norm|(query|key|value)_layernorm)$")
OPERATIONS: Final[tuple[tuple[str, str], ...]] = (  # the first pattern that is found in the module path counts
    (r"(^|\.)(embed_tokens|embeddings|embed_tokens_per_layer)$", "the rows of the embedding that the ids name"),
    (r"(^|\.)[qk]_norm$", "the norm of each head: its eps, its weight, or the heads that go into it"),
    (r"norm(_f|\d)?$|layernorm(_\d)?$", "the norm (eps, weight, offset of the weight), or the sum and scale before it"),
    (
        r"(^|\.)(q_proj|k_proj|v_proj|qkv_proj|in_proj\w*|q_a_proj|q_b_proj|kv_\w+)$",
        "the product with its weight, or its bias",
    ),
    (
        r"(^|\.)(self_attn|attn|mixer)\.(o_proj|out_proj|dense|wo)$",
        "between the projections and this one: rotation, scale, mask, softmax or cache; or the product with its weight",
    ),
    (r"(^|\.)(linear_attn)\.(out_proj|norm)$", "the recurrence, its gate or the norm after it; or the product"),
    (r"(^|\.)conv1d?$", "the convolution: its window, its state or its weight"),
    (r"(^|\.)(gate|router|router\.proj)$", "the router: its product, its scores or its choice"),
    (r"(^|\.)(switch_mlp|switch_glu|experts)$", "the experts: which are chosen, in which order, and their products"),
    (r"(^|\.)(gate_proj|up_proj|gate_up_proj|c_fc|w1|w3)$", "the product with its weight, or its bias"),
    (
        r"(^|\.)(down_proj|c_proj|w2)$",
        "the activation between the projections and this one, or the product with its weight",
    ),
    (r"(^|\.)(mlp|feed_forward|block_sparse_moe)$", "the weights of the chosen experts and their sum"),
    (r"(^|\.)layers\.\d+$", "the sums of the residual stream, or a factor on them"),
    (r"(^|\.)lm_head$", "the product of the head"),
    (rf"^{LOGITS}$", "the head, or what follows it: a softcap, a factor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where two traces part first.

    Attributes:
        step: Counted from 0, as in `logits/0`.
        module: Path of the first module in execution order whose output differs; `logits` where every recorded output of
            the step agrees and its row does not; `token_ids` where the row agrees too and the id that follows does not.
        operation: What lies between the outputs that agree and the one that does not, in words.
        before: The modules that finished last before it, all of them alike on both sides, oldest first.
        inputs_identical: Whether anything is known to go into it that agrees: a module finished before it, or a step did.
        diff: The two outputs compared; None where one side lacks it, or has ids alone.
        heads: The heads that hold differing elements, where the module's output is laid out by heads; otherwise empty.
        only_on: The side that alone has this output.
    """

    step: int
    module: str
    operation: str
    before: tuple[str, ...] = ()
    inputs_identical: bool = False
    diff: TensorDiff | None = None
    heads: tuple[int, ...] = ()
    only_on: Side | None = None


def localize(expected: Trace, actual: Trace, *, head_width: int | None = None) -> Place | None:
    """Find the first output that differs; None where the traces hold the same bits.

    Args:
        expected: The oracle's trace, ideally of a case with `record=("*",)`.
        actual: The engine's, of the same case.
        head_width: Elements of a head, for the head of an element.
    """
    steps = sum(name.startswith(f"{LOGITS}/") for name in expected.tensors)
    for step in range(steps):
        if place := _in_step(expected, actual, step, head_width) or _id_of(expected, actual, step):
            return place
    return None


def modules_of(trace: Trace, step: int) -> tuple[str, ...]:
    """Module paths that were recorded at a step, in execution order."""
    start = activation_name(step, "")
    return tuple(name[len(start) :] for name in trace.tensors if name.startswith(start))


def operation_of(module: str) -> str:
    """What a module computes beyond the modules inside and before it, in words."""
    return next((text for pattern, text in OPERATIONS if re.search(pattern, module)), "what this module computes")


def _in_step(expected: Trace, actual: Trace, step: int, head_width: int | None) -> Place | None:
    done: list[str] = []
    order = _merged(modules_of(expected, step), modules_of(actual, step))
    for module in (*order, LOGITS):
        name = logits_name(step) if module == LOGITS else activation_name(step, module)
        want, got = expected.tensors.get(name), actual.tensors.get(name)
        if want is not None and got is not None and want.digest == got.digest:
            done.append(module)
            continue
        diff = None if want is None or got is None else TensorDiff.of(want, got)
        return Place(
            step=step,
            module=module,
            operation=operation_of(module),
            before=tuple(done[-SHOWN:]),
            inputs_identical=bool(done) or step > 0,
            diff=diff,
            heads=_heads(module, want, got, head_width),
            only_on="actual" if want is None else "expected" if got is None else None,
        )
    return None


def _id_of(expected: Trace, actual: Trace, step: int) -> Place | None:
    """The id that was picked from a row, where the row agrees and the id does not."""
    if expected.token_ids[step] == actual.token_ids[step]:
        return None
    return Place(
        step=step,
        module=TOKEN_IDS,
        operation="the choice of the id from a row that agrees",
        before=(LOGITS,),
        inputs_identical=True,
    )


def _merged(expected: Sequence[str], actual: Sequence[str]) -> list[str]:
    """The expected order, with what the actual side alone has after the module that it follows there."""
    order = list(expected)
    known = set(order)
    last = -1
    for module in actual:
        if module in known:
            last = order.index(module)
        else:
            last += 1
            order.insert(last, module)
    return order


def _heads(module: str, want: Tensor | None, got: Tensor | None, head_width: int | None) -> tuple[int, ...]:
    if want is None or got is None or not BY_HEADS.search(module) or want.shape != got.shape:
        return ()
    differs = want.bits() != got.bits()
    if want.bits().ndim == 3:  # [B, H, E]: a norm that runs head by head; of one alone nobody knows which it is
        if want.shape[1] == 1:
            return ()
        return tuple(int(head) for head in np.flatnonzero(differs.any(axis=(0, 2))))
    if head_width is None or want.shape[-1] % head_width:
        return ()
    return tuple(
        int(head) for head in np.flatnonzero(differs.reshape(-1, want.shape[-1] // head_width, head_width).any((0, 2)))
    )


def incomparable(place: Place) -> bool:
    """Whether the two outputs have no elements to compare: one is missing, or dtype or shape differ."""
    return place.only_on is not None or (place.diff is not None and place.diff.match is Match.INCOMPARABLE)
