"""Which processes a job has, and what each of them needs."""

from t2g.config.common import ProcessConfig
from t2g.config.evaluation import PolicyEvaluationJob
from t2g.config.feedback import FeedbackConfig, RolloutConfig
from t2g.config.jobs import AnnotateJob, AnyJob, DemoJob, PolicyJob, ScoreJob, SFTJob
from t2g.config.learning import LearnerConfig
from t2g.config.serving import ServeJob
from t2g.config.stopwatch import BenchmarkJob

ENGINE_SHARE = 0.6  # of a GPU in Ray's books, with cluster.colocate: above half, so that no two engines meet on one


def shared(job: PolicyJob | DemoJob) -> tuple[RolloutConfig, LearnerConfig]:
    """Engines and ranks as Ray is asked for their places."""
    if not job.cluster.colocate:
        return job.rollout, job.learner
    return (  # not checked again: an engine whose turn it is may have more of the memory than its share of the books
        job.rollout.model_copy(update={"gpus": ENGINE_SHARE}),
        job.learner.model_copy(update={"gpus": 1 - ENGINE_SHARE}),
    )


def roles(job: AnyJob) -> dict[str, ProcessConfig]:
    """The processes that a job has at one time, by the config section that says what they need; {}: it needs no Ray.

    A PolicyJob whose critic has ranks of its own and whose feedback comes from engines of ours: rollout, learner,
    learner.critic_ranks, feedback.engine.
    """
    match job:
        case PolicyJob():
            rollout, learner = shared(job)
            own = {"rollout": rollout, **learner.roles(job.objective)}
            return own | _judge("feedback", job.feedback)
        case DemoJob():
            rollout, learner = shared(job)
            own = {"rollout": rollout, **learner.roles(job.objective)}
            return own | {"reward_engine": job.reward_engine}
        case AnnotateJob():
            sampling = {"rollout": job.rollout} if job.annotate.responses == "policy" else {}
            return {**sampling, **_judge("annotate", job.annotate)}
        case SFTJob():  # a reward model's engine starts when the ranks have gone
            return {"sft": job.sft}
        case PolicyEvaluationJob():  # one policy after the other
            return {"rollout": job.rollout} if job.served else {}
        case ServeJob():  # a process beside Ray
            return {}
        case ScoreJob():
            return _judge("feedback", job.feedback)
        case BenchmarkJob():
            return {"rollout": job.rollout, "learner": job.learner}
    raise TypeError(f"{type(job).__name__} has no roles")


def _judge(section: str, feedback: FeedbackConfig) -> dict[str, ProcessConfig]:
    return {f"{section}.engine": feedback.engine} if feedback.own_engines else {}
