"""One GRPO job in TRL, run by the benchmark inside TRL's own environment: prints a JSON object.

    python trl_run.py job.json

The job names model folder, rows, seed, steps, prompts, group, micro_batch, max_tokens, learning_rate,
threads, output folder and the source of ``grade(sample, item)``. The time is that of ``train()`` alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(OMP_NUM_THREADS=str(job["threads"]), OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    scope: dict = {}
    exec(job["grader"], scope)
    rows = [{"prompt": row["messages"], "item": json.dumps(row)} for row in job["rows"]]

    def reward(completions: list, item: list, **_: object) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [
            scope["grade"]({"output_text": text}, json.loads(row))
            for text, row in zip(texts, item, strict=True)
        ]

    config = GRPOConfig(
        output_dir=job["output"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["prompts"] * job["group"] // job["micro_batch"],
        num_generations=job["group"],
        max_completion_length=job["max_tokens"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        bf16=True,
        use_cpu=True,
        seed=job["seed"],
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(
        json.dumps(
            {
                "seconds": seconds,
                "rewards": [entry["reward"] for entry in logged],
                "lengths": [entry["completions/mean_length"] for entry in logged],
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
