"""One example a verb, shown by `assay --help`. A test parses each of them, so none can go stale."""

from typing import Final

EXAMPLES: Final = {
    "models": "assay models fetch smollm2-135m",
    "oracles": "assay oracles sync mlx-lm",
    "cases": "assay cases 'llama-tiny/f32/*'",
    "record": "assay record 'llama-tiny/*' --jobs 2",
    "check": "assay check 'llama-tiny/*' --junit reports/parity.xml",
    "explain": "assay explain llama-tiny/f32/fp/greedy/p40-whole",
    "diff": "assay diff traces/a traces/b",
    "sweep": "assay sweep 'gemma*/f32/fp/batch-*'",
    "mutate": "assay mutate",
    "bench": "assay bench smollm2-135m --prompts 32,256",
    "report": "assay report --golden llama-tiny/f32/fp/greedy/p40-whole",
    "generate": "assay generate smollm2-135m 'What is the capital of France?'",
}


def told(verbs: tuple[str, ...]) -> str:
    """The examples of these verbs, a line each; a verb without one is the test's to find."""
    return "examples:\n" + "\n".join(f"  {EXAMPLES[verb]}" for verb in verbs if verb in EXAMPLES)
