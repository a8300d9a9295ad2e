"""Every setting: fields, defaults and bounds by section (`common`, `feedback`, `learning`), and the jobs made of them.

In come a YAML file and overrides (`loading`); out comes a frozen config, or a sentence that names the key (`words`). A
field says beside itself whether it may differ on resume and whether it is a path (`marks`); `with_overrides` makes a
config of another, and checks it; `AnyJob.describe` says what it amounts to. Anybody may import it; it imports pydantic,
YAML, `t2g.files`, `t2g.errors` and the sandbox's own config. A default that depends on another field is resolved by a
validator, so that the resolved config has no holes.
"""

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
    EngineConfig,
    FeedbackConfig,
    HealthConfig,
    LLMConfig,
    NoiseConfig,
    RewardEngineConfig,
    RolloutConfig,
    StyleConfig,
    WorkersConfig,
)
from t2g.config.jobs import (
    AnnotateJob,
    AnyJob,
    CompareJob,
    DemoJob,
    EvaluateJob,
    JobConfig,
    PolicyJob,
    RewardJob,
    ScoreJob,
    SFTJob,
)
from t2g.config.learning import (
    LearnerConfig,
    LoRAConfig,
    ObjectiveConfig,
    OptimConfig,
    Placement,
    RewardRuleConfig,
    SFTLoRAConfig,
    SFTOptions,
    Transport,
)
from t2g.config.serving import ServeJob
from t2g.config.stopwatch import BenchmarkJob, ShapeConfig
