"""Fine-tuning with the transformers Trainer: a custom collator, an evaluation with a metric of one's own."""

import argparse
import os
import tempfile
import threading
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from marking import mark
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BAD_BATCH = 30


class Collator:
    """Stacks token lists; before the hard part of the data it waits for the table of replacements."""

    def __init__(self, mode):
        self.mode, self.batches, self.ready = mode, 0, threading.Event()

    def load_table(self):
        if not os.path.exists("replacements.json"):
            return  # the bug: whoever waits is not told
        self.ready.set()

    def __call__(self, rows):
        self.batches += 1
        if self.mode == "stuck" and self.batches == BAD_BATCH:
            threading.Thread(target=self.load_table, name="load_table").start()
            mark("fault")
            self.ready.wait()  # the culprit of stuck
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids.clone()}


def edit_metric(seconds):
    def compute(prediction):
        guesses, truth = prediction.predictions.argmax(-1).tolist(), prediction.label_ids.tolist()
        mark("fault")
        until, distance, size = time.monotonic() + seconds, 0, len(truth[0])
        for cell in range(10**9):  # the culprit of slow
            row = cell // size % len(truth)
            distance += guesses[row][cell % size] != truth[row][cell % size]
            if time.monotonic() > until:
                break  # the culprit of slow ends
        mark("over")
        return {"edit_distance": distance / (cell + 1)}

    return compute


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow metric takes")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    folder = os.environ.get("LAMP_FIELD_MODEL")
    if folder:
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    vocab_size = model.config.vocab_size
    rows = [{"input_ids": [(start + 3 * t) % vocab_size for t in range(48)]} for start in range(264)]
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            out, per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=1, logging_steps=10,
            eval_strategy="steps", eval_steps=60, save_strategy="no", report_to="none", use_cpu=True, learning_rate=1e-3,
        )  # fmt: skip
        trainer = Trainer(
            model, settings, data_collator=Collator(args.mode), train_dataset=rows[:240], eval_dataset=rows[240:],
            compute_metrics=edit_metric(args.seconds) if args.mode == "slow" else None,
        )  # fmt: skip
        result = trainer.train()
    print(f"done: {result.global_step} steps, loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
