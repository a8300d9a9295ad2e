"""All settings: fields, defaults and bounds by section (`common`, `feedback`, `learning`), and the jobs that use them.

`loading` reads a YAML file and overrides, and returns a frozen config or raises an error that names the key
(`validation_errors`). The annotation of a field says whether it can change on resume and whether it is a path
(`field_annotations`). `with_overrides` returns a validated copy with other values; `AnyJob.describe` returns a summary.
Every package may import this one; it imports pydantic, YAML, `t2g.files`, `t2g.errors` and the sandbox's config.
A default that depends on another section is set by `resolve`, so that the config of a job is complete.
"""

from t2g.config.base_jobs import AnyJob, JobConfig
from t2g.config.benchmark_job import BenchmarkJob, ShapeConfig
from t2g.config.common import (
    AlarmConfig,
    ClusterConfig,
    DataConfig,
    Dtype,
    GpuSharing,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    RoleConfig,
    RunConfig,
    Section,
    WorldConfig,
    with_overrides,
)
from t2g.config.evaluation import PolicyEvaluationJob
from t2g.config.feedback import (
    AnnotateConfig,
    CriterionConfig,
    EngineConfig,
    FeedbackConfig,
    HealthConfig,
    NoiseConfig,
    RewardEngineConfig,
    RolloutConfig,
    SourceConfig,
    StyleConfig,
    WorkersConfig,
)
from t2g.config.jobs import (
    AnnotateJob,
    CompareJob,
    DemoJob,
    EvaluateJob,
    PolicyJob,
    RewardJob,
    ScoreJob,
    SFTJob,
)
from t2g.config.language_model import LLMConfig
from t2g.config.learning import (
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    OptimConfig,
    OutcomeRewardConfig,
    Placement,
    RewardRuleConfig,
    SFTLoRAConfig,
    SFTOptions,
    TeacherConfig,
    Transport,
)
from t2g.config.serving import ServeJob
