"""What the new-job form says about the spec's fields, where their own names and descriptions do not do."""

from __future__ import annotations

RL = "rl"

#: How the choice between the models of a field reads, and what is said where one has no settings.
VARIANT_WORDS = {
    "sync": ("Synchronous", "Every step samples with the newest weights: rollouts wait for the update."),
    "async": ("Asynchronous", ""),
    "lora": ("LoRA adapter", ""),
    "full": (
        "Every weight",
        "All parameters of the model are trained. Each device holds the weights, the gradients and the "
        "optimizer's moments.",
    ),
}
SECTION_WORDS = {
    RL: ("Run", "How long, on how many rows, and what happens to them."),
    f"{RL}.sampling": ("Sampling", "How completions are drawn from the model, and how long they may be."),
    f"{RL}.mode": ("Steps", "Whether rollouts wait for the update before them."),
    f"{RL}.tuning": ("What is trained", "A small adapter beside frozen weights, or every weight."),
    f"{RL}.optimizer": ("Optimizer", "AdamW over the job's optimizer steps."),
    f"{RL}.loss": ("Loss", "What is minimized, and what is added to it."),
    f"{RL}.value": ("Value head", "What PPO expects of every token, learned beside the policy."),
}
#: Settings of the first section that are about the machine rather than about learning.
MACHINE = (
    "precision",
    "devices",
    "micro_batch_size",
    "checkpoint_every",
    "keep_checkpoints",
    "sample_groups",
)
MACHINE_WORDS = ("Devices and checkpoints", "Where it runs and what it leaves behind.")

LABELS = {
    "steps": "Steps",
    "kl_beta": "KL weight (beta)",
    "kl_in": "KL taken in",
    "kl_estimator": "KL estimator",
    "eps": "Epsilon",
    "beta1": "Beta 1",
    "beta2": "Beta 2",
    "dpo_beta": "DPO beta",
    "max_grad_norm": "Gradient clip norm",
    "average": "Average over",
    "lam": "Lambda",
    "coef": "Weight of its loss",
}
#: Said where the schema's own description leaves a beginner alone.
HELP = {
    f"{RL}.steps": "rounds of rollouts, grading and training",
    f"{RL}.prompts_per_step": "rows of the data drawn per step",
    f"{RL}.tuning.rank": "width of the adapter; more learns more and costs more",
    f"{RL}.optimizer.learning_rate": "peak rate; left empty, as suits the algorithm and what is trained",
    f"{RL}.optimizer.schedule": "how the rate goes on after the warm-up",
    f"{RL}.optimizer.beta1": "decay of the gradient's running mean",
    f"{RL}.optimizer.beta2": "decay of its running square",
    f"{RL}.optimizer.eps": "keeps the division stable",
    f"{RL}.optimizer.weight_decay": "pull of the weights towards zero per step",
}

#: By method: what the rows of the data must be.
ROWS = {
    "reinforcement": (
        "Each row is a prompt whose last message is the user's; the model answers it, and a grader or an "
        "environment scores the answer.",
        '{"messages": [{"role": "user", "content": "…"}], "answer": "…"}',
    ),
    "supervised": (
        "Each row is a conversation whose last message is the assistant's; what the assistant says in it "
        "is learned.",
        '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    ),
    "dpo": (
        "Each row is a prompt with a preferred answer and another one.",
        '{"input": {"messages": […]}, "preferred_output": […], "non_preferred_output": […]}',
    ),
}
METHOD_WORDS = {
    "reinforcement": "Reinforcement learning",
    "supervised": "Supervised fine-tuning",
    "dpo": "Preference learning",
}
