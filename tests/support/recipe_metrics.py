"""The names of all metrics of a run that learns by PPO and is evaluated."""

from __future__ import annotations

GROUPS = {
    "episode": {
        "count", "return_mean", "return_min", "return_max",
        "length_mean", "length_min", "length_max",
    },
    "loss": {"objective", "critic", "entropy"},
    "policy": {"entropy", "clip_fraction", "kl"},
    "optim": {"gradient_norm", "learning_rate"},
    "speed": {"steps_per_second", "steps_per_second_overall"},
    "time": {
        "elapsed_s", "executors_stepping", "executors_waiting_for_action",
        "executors_waiting_for_round", "actors_inferring", "actors_waiting", "actor_batch_size",
        "learner_learning", "learner_waiting",
    },
    "evaluation": {"return_mean", "return_min", "return_max", "length_mean", "episodes"},
}  # fmt: skip
NAMES = {f"{group}/{name}" for group, names in GROUPS.items() for name in names}
