"""``python -m lab train-head``: a small EAGLE head for a Llama-shaped target, from what the target itself says.

Beginnings of texts are gone on with by the target; the head learns to foretell the target's next hidden states from
those before and the token between (smooth L1), and its choice of tokens (cross entropy), as EAGLE does (Li et al. 2024,
section 3.2). Of the texts every fifth is left out, and written beside the head: measure with these
(``python -m lab speculation --prompts OUTPUT/held-out.jsonl``).

What lives here: training. What may not: measuring, heads as they draft.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.bench.arguments import count

PROMPT, ANSWER = 48, 80  # tokens
HELD_OUT = 5
NOISE = 0.1  # onto hidden states, which drafts go on from with errors in them
_RATE = 2e-3
CLASSES = 0.1  # weight of the choice of tokens beside hidden states


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="folder of a Llama-shaped model with its tokenizer")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSON lines with 'text' or 'messages'")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training (default: 5)")
    parser.add_argument("--answers", type=count, default=512, help="that the target is asked for (default: 512)")
    parser.add_argument("--batch", type=count, default=16, help="(default: 16)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of these answers (default: 0)")


class Head(nn.Module):
    """One decoder layer without its first norm, behind fc."""

    def __init__(self, target: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        super().__init__()
        size = target.config.hidden_size
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList([LlamaDecoderLayer(target.config, 0)])
        self.layers[0].input_layernorm = nn.Identity()

    def forward(self, embedded: Tensor, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        found: Tensor = self.layers[0](x, position_embeddings=turns)
        return found


def run(args: argparse.Namespace) -> int:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    target.eval()
    target.requires_grad_(False)
    args.output.mkdir(parents=True, exist_ok=True)
    prompts = _prompts(args)
    print(f"{len(prompts)} beginnings of {PROMPT} tokens", flush=True)
    answers = torch.cat(list(_answers(target, prompts[: args.answers], args)))
    head = Head(target)
    print(f"{sum(each.numel() for each in head.parameters()):,} parameters, {answers.numel():,} tokens", flush=True)
    _train(head, target, answers, args)
    _save(head, target, args)
    return 0


def _prompts(args: argparse.Namespace) -> Tensor:  # [beginnings, PROMPT]
    from transformers import AutoTokenizer

    tokenizer, found, left = AutoTokenizer.from_pretrained(args.target), list[list[int]](), list[str]()
    for file in args.texts:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            if number % HELD_OUT == 0:
                left.append(line)
                continue
            entry = json.loads(line)
            ids: Any = (
                tokenizer.encode(entry["text"])
                if "text" in entry
                else tokenizer.apply_chat_template(entry["messages"], return_dict=False)
            )
            found += [ids[at : at + PROMPT] for at in range(0, len(ids) - PROMPT, PROMPT)]
    (args.output / "held-out.jsonl").write_text("\n".join(left) + "\n", encoding="utf-8")
    order = torch.randperm(len(found))
    return torch.tensor(found)[order]


def _answers(target: Any, prompts: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """[batch, PROMPT + ANSWER] each."""
    sampled = (
        {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {"do_sample": False}
    )
    begun = time.perf_counter()
    for at, part in enumerate(prompts.split(4 * args.batch)):
        yield target.generate(
            part, attention_mask=torch.ones_like(part), min_new_tokens=ANSWER, max_new_tokens=ANSWER, **sampled
        )
        print(f"answers {(at + 1) * 4 * args.batch}: {time.perf_counter() - begun:.0f} s", flush=True)


def _train(head: Head, target: Any, answers: Tensor, args: argparse.Namespace) -> None:
    with torch.no_grad():
        hidden = torch.cat([target.model(part).last_hidden_state for part in answers.split(args.batch)])
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, betas=(0.9, 0.95))
    begun, step, smooth, done = time.perf_counter(), 0, torch.zeros(2), 0.0
    while done < 1.0:
        for which in torch.randperm(len(answers)).split(args.batch):
            done = (time.perf_counter() - begun) / (60 * args.minutes)
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, (step + 1) / 30) * max(0.05, 1.0 - done)
            loss, right = _loss(head, target, answers[which], hidden[which])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            step += 1
            smooth += max(0.05, 1 / step) * (torch.stack([loss.detach(), right]) - smooth)
            if step % 50 == 0:
                print(f"step {step}, {done:.0%}: loss {smooth[0]:.3f}, first draft right {smooth[1]:.3f}", flush=True)
            if done >= 1.0:
                break


def _loss(head: Head, target: Any, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """And how often the first draft behind a token of the answers would be right."""
    wanted, positions = hidden[:, 1:-1], torch.arange(ids.shape[1] - 2)[None]
    noisy = hidden[:, :-2] + NOISE * (torch.rand_like(wanted) - 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            logits = target.lm_head(wanted[:, PROMPT:]).float()
        out = head(target.model.embed_tokens(ids[:, 1:-1]), noisy, target.model.rotary_emb(hidden, positions))
        drafted = target.lm_head(out[:, PROMPT:]).float()
    chosen = F.cross_entropy(drafted.flatten(0, 1), logits.softmax(-1).flatten(0, 1))
    right = (drafted.argmax(-1) == logits.argmax(-1)).float().mean()
    return F.smooth_l1_loss(out.float(), wanted) + CLASSES * chosen, right


def _save(head: Head, target: Any, args: argparse.Namespace) -> None:
    from safetensors.torch import save_file

    config = target.config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}
    (args.output / "config.json").write_text(json.dumps(config, default=str))
    save_file({name: each.contiguous() for name, each in head.state_dict().items()}, args.output / "model.safetensors")
    print(f'written to {args.output}: --speculative-config \'{{"method": "eagle", "model": "{args.output}"}}\'')
