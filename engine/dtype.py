"""The dtypes that an engine computes in, by the names that cases use."""

from typing import Final, Literal

import mlx.core as mx

DTypeName = Literal["f32", "bf16", "f16"]

DTYPES: Final[dict[str, mx.Dtype]] = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
