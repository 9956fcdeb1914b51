"""`assay generate MODEL PROMPT`: text out of the reference engine."""

import argparse
import json
import sys
from typing import get_args

from tokenizers.decoders import DecodeStream

from engine.chat_template import ChatTemplate
from engine.dtype import DTypeName
from engine.generate import steps
from engine.model import open_model
from engine.tokenizer import Tokenizer
from parity.case import KV
from parity.engine_kv import engine_mode
from parity.engine_runner import chosen_kernels, weights_name
from parity.errors import UsageError
from parity.models.fetch import ensure_snapshot


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="text out of the reference engine, greedy",
        description="Feed a prompt to a snapshot and print what follows, greedy, until a stop token or --max-tokens.",
        epilog="example: assay generate smollm2-135m 'What is the capital of France?'",
    )
    parser.add_argument("model", help="a snapshot's name, or a folder")
    parser.add_argument("prompt", help="the user's message, or with --raw the text itself")
    parser.add_argument("--raw", action="store_true", help="do not put the prompt through the chat template")
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="stop after N tokens (100)")
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="f32", help="dtype to compute in (f32)")
    parser.add_argument("--kv", default="fp", metavar="MODE", help="KV mode: fp, kv8-g64, kv4-g32-s16 (fp)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print; returns 0."""
    if args.max_tokens < 1:
        raise UsageError("nothing to generate", max_tokens=args.max_tokens, next_step="give --max-tokens 1 or more")
    kv = KV.parse(args.kv)
    snapshot = ensure_snapshot(args.model)
    folder = snapshot.path
    tokenizer = Tokenizer.open(folder)
    text = args.prompt if args.raw else ChatTemplate.open(folder).render([{"role": "user", "content": args.prompt}])
    prompt_ids = tokenizer.encode(text)
    kernels, model = chosen_kernels(), open_model(folder, dtype=args.dtype)
    if kernels is not None:
        model = kernels.put_into(model, name=weights_name(snapshot, args.dtype))
    stream = DecodeStream(skip_special_tokens=True)
    ids: list[int] = []
    shown = ""
    stopped = False
    for step in steps(
        model,
        prompt_ids,
        num_steps=args.max_tokens,
        kv=engine_mode(kv),
    ):
        stopped = step.token_id in tokenizer.stop_ids
        if stopped:
            break
        ids.append(step.token_id)
        piece = stream.step(tokenizer.backend, step.token_id)
        if piece and not args.json:
            shown += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    if args.json:
        answer = {
            "prompt_ids": prompt_ids,
            "token_ids": ids,
            "text": tokenizer.decode(ids),
            "finish_reason": "stop" if stopped else "length",
        }
        print(json.dumps(answer, ensure_ascii=False))
    else:
        print(tokenizer.decode(ids).removeprefix(shown))  # a character that never got complete
    return 0
