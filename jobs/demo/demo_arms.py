"""The arms of `jobs.demo`: runs of PPO on its stages that differ in where the rewards are paid."""

from t2g.config import DataConfig, DemoJob, FeedbackConfig, Placement, PolicyJob, with_overrides

ARMS = "arms"  # folder of their runs


def arm_job(demo: DemoJob, arm: Placement) -> PolicyJob:
    """Return the job of one arm: the demo's settings with its placement of the rewards."""
    from jobs.artifacts.stages import WORLD, base_model, reward_model

    folder = demo.run.folder
    run = demo.run.make_part(root=folder / ARMS, name=arm, seed=demo.run.seed)
    posts = DataConfig(path=str(folder / WORLD / "train.jsonl"))
    heldout_posts = DataConfig(path=str(folder / WORLD / "heldout.jsonl"))
    feedback = FeedbackConfig(reward_model=reward_model(demo), engine=demo.reward_engine)
    objective = with_overrides(demo.objective, {"rewards.placement": arm})
    return PolicyJob(
        run=run,
        cluster=demo.cluster,
        task="tiny",
        model=base_model(demo),
        data=posts,
        eval_data=heldout_posts,
        num_steps=demo.num_steps,
        rollout=demo.rollout,
        feedback=feedback,
        objective=objective,
        learner=demo.learner,
        eval=demo.eval,
    )
