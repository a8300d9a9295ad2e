"""The methods of `jobs.demo`: runs of PPO that differ in the placement of rewards and in local credit."""

from t2g.config import DataConfig, DemoJob, FeedbackConfig, Placement, PolicyJob, with_overrides

METHODS_FOLDER = "methods"


def method_job(demo: DemoJob, method: Placement) -> PolicyJob:
    """Return the job of one method: the demo's settings with its placement of the rewards."""
    from jobs.artifacts.demo_artifacts import WORLD, base_model, reward_model

    folder = demo.run.folder
    run = demo.run.make_part(root=folder / METHODS_FOLDER, name=method, seed=demo.run.seed)
    posts = DataConfig(path=str(folder / WORLD / "train.jsonl"))
    heldout_posts = DataConfig(path=str(folder / WORLD / "heldout.jsonl"))
    feedback = FeedbackConfig(reward_model=reward_model(demo), engine=demo.reward_engine)
    objective = with_overrides(demo.objective, {"rewards.placement": method})
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
